#include "emulator/fiber.h"

#include <cstdlib>

#ifdef FASTATTN_EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {
namespace {

Fiber* running = nullptr;
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_size = 0;

#ifdef FASTATTN_EMULATOR_USES_UCONTEXT
ucontext_t scheduler_context;
#else
void* scheduler_stack_pointer = nullptr;
#endif

// AddressSanitizer has to be told of every change of stack, before and after.
void before_switch([[maybe_unused]] void** save, [[maybe_unused]] const void* stack,
                   [[maybe_unused]] size_t size) {
#ifdef FASTATTN_EMULATOR_ASAN
  __sanitizer_start_switch_fiber(save, stack, size);
#endif
}

void after_switch([[maybe_unused]] void* saved, [[maybe_unused]] const void** stack,
                  [[maybe_unused]] size_t* size) {
#ifdef FASTATTN_EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(saved, stack, size);
#endif
}

}  // namespace

#ifndef FASTATTN_EMULATOR_USES_UCONTEXT
// Saves the registers a call preserves and the stack pointer, and takes up those saved in `load`.
extern "C" void fastattn_emulator_switch(void** save, void* load);
asm(R"(
.text
.globl fastattn_emulator_switch
.hidden fastattn_emulator_switch
.type fastattn_emulator_switch, @function
fastattn_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fastattn_emulator_switch, .-fastattn_emulator_switch
)");
#endif

void Fiber::enter() {
  after_switch(nullptr, &scheduler_stack, &scheduler_stack_size);
  running->body_();
  std::abort();
}

void Fiber::start(char* stack, size_t size, void (*body)()) {
  stack_ = stack;
  size_ = size;
  body_ = body;
  fake_stack_ = nullptr;
#ifdef FASTATTN_EMULATOR_ASAN
  __asan_unpoison_memory_region(stack, size);
#endif
#ifdef FASTATTN_EMULATOR_USES_UCONTEXT
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = size;
  context_.uc_link = nullptr;
  makecontext(&context_, enter, 0);
#else
  // What the switch pops: six registers, then the address of `enter`, at which the stack pointer
  // is 8 below a multiple of 16, as after any call.
  void** top = reinterpret_cast<void**>(stack + size) - 1;
  *top = nullptr;
  *--top = reinterpret_cast<void*>(enter);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  stack_pointer_ = top;
#endif
}

void Fiber::resume() {
  running = this;
  before_switch(&scheduler_fake_stack, stack_, size_);
#ifdef FASTATTN_EMULATOR_USES_UCONTEXT
  swapcontext(&scheduler_context, &context_);
#else
  fastattn_emulator_switch(&scheduler_stack_pointer, stack_pointer_);
#endif
  after_switch(scheduler_fake_stack, nullptr, nullptr);
}

void Fiber::yield(bool last) {
  before_switch(last ? nullptr : &fake_stack_, scheduler_stack, scheduler_stack_size);
#ifdef FASTATTN_EMULATOR_USES_UCONTEXT
  swapcontext(&context_, &scheduler_context);
#else
  fastattn_emulator_switch(&stack_pointer_, scheduler_stack_pointer);
#endif
  after_switch(fake_stack_, &scheduler_stack, &scheduler_stack_size);
}

}  // namespace emulator
