// The ground all kernels stand on: one source for NVRTC, nvcc and, on emulated threads, g++ or
// clang.
//
//   FA_ARCH          the architecture compiled for, 600, 700, 750, ..; choose paths by it alone
//   FA_DEVICE        before device functions
//   FA_GRID_CONSTANT before a kernel's parameter: void name(FA_GRID_CONSTANT const Params p)
//   FA_UNROLL        before a loop; FA_UNROLL_N(n) unrolls n times, FA_UNROLL_N(1) not at all
//   SharedMemory     divides the launch's dynamic shared memory into arrays
//   load_shared, store_shared, load_global, store_global   one access of up to 16 bytes
//
// On emulated threads each of these is checked (csrc/emulator/emulator.h). Kernels include nothing
// of the standard library: NVRTC has none.
#pragma once

#ifndef FASTATTN_EMULATOR
#ifdef __CUDACC_RTC__
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
using size_t = unsigned long;
using uintptr_t = unsigned long;
#else
#include <cuda_runtime.h>

#include <cstdint>
#endif
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#ifdef FASTATTN_EMULATOR
#define FA_DEVICE inline
#define FA_UNROLL
#define FA_UNROLL_N(n)
#define FA_GRID_CONSTANT
#define FA_SITE , emulator::Site at = emulator::Site::here()
#define FA_FROM_SITE , at
#else
#ifdef __CUDA_ARCH__
#define FA_ARCH __CUDA_ARCH__
#else
#define FA_ARCH 0
#endif
#define FA_DEVICE __device__ __forceinline__
#define FA_PRAGMA_(x) _Pragma(#x)
#define FA_UNROLL _Pragma("unroll")
#define FA_UNROLL_N(n) FA_PRAGMA_(unroll n)
#define FA_SITE
#define FA_FROM_SITE
#if FA_ARCH >= 700
#define FA_GRID_CONSTANT __grid_constant__
#else
#define FA_GRID_CONSTANT
#endif
#endif

namespace fa {

// Bits of one type as another of the same size.
template <class To, class From>
FA_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(static_cast<void*>(&to), &from, sizeof to);
  return to;
}

// Takes arrays one after the other from the launch's dynamic shared memory. Every thread takes the
// same arrays in the same order; each starts at a multiple of 16 bytes.
class SharedMemory {
 public:
  template <class T>
  FA_DEVICE T* take(int count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
#ifdef FASTATTN_EMULATOR
    void* array = emulator::take_shared(bytes, taken_, arrays_++);
#else
    extern __shared__ __align__(16) unsigned char fa_dynamic_shared_memory[];
    void* array = fa_dynamic_shared_memory + taken_;
#endif
    taken_ += (bytes + 15) / 16 * 16;
    return static_cast<T*>(array);
  }

 private:
  size_t taken_ = 0;
#ifdef FASTATTN_EMULATOR
  int arrays_ = 0;
#endif
};

// The shared bytes that SharedMemory needs for an array.
template <class T>
constexpr int shared_bytes(int count) {
  return (count * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
}

// One load of a V (2, 4, 8 or 16 bytes) from shared memory, at an address that is a multiple of its
// size.
template <class V, class T>
FA_DEVICE V load_shared(const T* p FA_SITE) {
#ifdef FASTATTN_EMULATOR
  emulator::touch_shared(emulator::Access::load, p, sizeof(V), nullptr, at);
#endif
  return *reinterpret_cast<const V*>(p);
}

template <class V, class T>
FA_DEVICE void store_shared(T* p, const V& value FA_SITE) {
#ifdef FASTATTN_EMULATOR
  emulator::touch_shared(emulator::Access::store, p, sizeof(V), &value, at);
#endif
  *reinterpret_cast<V*>(p) = value;
}

// One load of a V from global memory that nobody writes during the launch; V is a type of CUDA's
// (float, float4, uint2, ..) and the address a multiple of its size.
template <class V, class T>
FA_DEVICE V load_global(const T* p FA_SITE) {
#ifdef FASTATTN_EMULATOR
  emulator::check_aligned(p, sizeof(V), "misaligned access to global memory", at);
#endif
  return __ldg(reinterpret_cast<const V*>(p));
}

template <class V, class T>
FA_DEVICE void store_global(T* p, const V& value FA_SITE) {
#ifdef FASTATTN_EMULATOR
  emulator::check_aligned(p, sizeof(V), "misaligned access to global memory", at);
#endif
  *reinterpret_cast<V*>(p) = value;
}

}  // namespace fa
