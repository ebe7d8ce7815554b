// A fiber: a function on a stack of its own, which the scheduler resumes and which gives way
// itself. x86-64 switches in a few instructions; other machines use ucontext, which costs a system
// call.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define FASTATTN_EMULATOR_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FASTATTN_EMULATOR_ASAN 1
#endif
#endif

#if !defined(__x86_64__) || defined(FASTATTN_EMULATOR_UCONTEXT)
#include <ucontext.h>
#define FASTATTN_EMULATOR_USES_UCONTEXT 1
#endif

namespace emulator {

class Fiber {
 public:
  // Prepares `body` to run on `stack` at the next resume. It must end in yield(last).
  void start(char* stack, size_t size, void (*body)());

  // Called by the scheduler: runs the fiber until it yields.
  void resume();

  // Called by the fiber: goes back to the scheduler. `last`: it is never resumed again.
  void yield(bool last = false);

 private:
  static void enter();

  void (*body_)() = nullptr;
  char* stack_ = nullptr;
  size_t size_ = 0;
  void* fake_stack_ = nullptr;
#ifdef FASTATTN_EMULATOR_USES_UCONTEXT
  ucontext_t context_;
#else
  void* stack_pointer_ = nullptr;
#endif
};

}  // namespace emulator
