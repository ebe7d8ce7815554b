// What turns a kernel into a function that the emulator runs: FASTATTN_EMULATOR_KERNEL(name)
// defines the C functions fastattn_kernel (runs one thread) and fastattn_kernel_params_size.
#pragma once

#include <cstddef>

namespace emulator {

template <class Params>
Params params_of(void (*)(Params));

template <class Params>
void call(void (*kernel)(Params), const void* params) {
  kernel(*static_cast<const Params*>(params));
}

}  // namespace emulator

#define FASTATTN_EMULATOR_KERNEL(...)                                                      \
  extern "C" __attribute__((visibility("default"))) void fastattn_kernel(const void* p) {  \
    emulator::call(&__VA_ARGS__, p);                                                       \
  }                                                                                        \
  extern "C" __attribute__((visibility("default"))) size_t fastattn_kernel_params_size() { \
    return sizeof(decltype(emulator::params_of(&__VA_ARGS__)));                            \
  }
