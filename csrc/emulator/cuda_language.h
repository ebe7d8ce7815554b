// CUDA C++ for g++ and clang: what nvcc's language and built-in functions add, on the emulator.
// The compiler is told to include this before a kernel's source, which then needs no change.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>

#include "emulator/emulator.h"

// NVIDIA's headers define these for compilers of host code.
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __forceinline__
#undef __noinline__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size
#define warpSize 32

using std::max;
using std::min;

inline void __syncthreads(emulator::Site at = emulator::Site::here()) {
  emulator::block_barrier(at);
}

inline void __syncwarp(uint32_t mask = 0xffffffffu, emulator::Site at = emulator::Site::here()) {
  emulator::collective("__syncwarp", mask, 0, at, [](const int*) { return 0; });
}

namespace emulator {

// The value of lane `source`, or one's own where the shuffle leaves its group of `width` lanes.
template <class T>
T shuffle(const char* name, uint32_t mask, T value, int source, bool inside, Site at) {
  return collective(name, mask, value, at, [&](const T* values) {
    if (!inside) return value;
    if (!(mask >> source & 1)) fail("mask mismatch: a shuffle from a lane outside the mask", at);
    return values[source];
  });
}

inline uint32_t ballot(const char* name, uint32_t mask, bool predicate, Site at) {
  return collective(name, mask, predicate, at, [&](const bool* values) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1 && values[i]) bits |= 1u << i;
    return bits;
  });
}

}  // namespace emulator

template <class T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32,
              emulator::Site at = emulator::Site::here()) {
  const int first = emulator::lane() & ~(width - 1);
  return emulator::shuffle("__shfl_sync", mask, value, first + (source & (width - 1)), true, at);
}

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32,
                  emulator::Site at = emulator::Site::here()) {
  const int lane = emulator::lane(), source = lane ^ bits;
  const bool inside = source / width <= lane / width;
  return emulator::shuffle("__shfl_xor_sync", mask, value, source & 31, inside, at);
}

template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32,
                   emulator::Site at = emulator::Site::here()) {
  const int lane = emulator::lane(), source = lane + static_cast<int>(delta);
  const bool inside = source / width == lane / width;
  return emulator::shuffle("__shfl_down_sync", mask, value, source & 31, inside, at);
}

template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32,
                 emulator::Site at = emulator::Site::here()) {
  const int lane = emulator::lane(), source = lane - static_cast<int>(delta);
  const bool inside = source >= 0 && source / width == lane / width;
  return emulator::shuffle("__shfl_up_sync", mask, value, source & 31, inside, at);
}

inline uint32_t __ballot_sync(uint32_t mask, bool predicate,
                              emulator::Site at = emulator::Site::here()) {
  return emulator::ballot("__ballot_sync", mask, predicate, at);
}

inline int __any_sync(uint32_t mask, bool predicate, emulator::Site at = emulator::Site::here()) {
  return emulator::ballot("__any_sync", mask, predicate, at) != 0;
}

inline int __all_sync(uint32_t mask, bool predicate, emulator::Site at = emulator::Site::here()) {
  return emulator::ballot("__all_sync", mask, predicate, at) == mask;
}

template <class T>
T __ldg(const T* p) {
  return *p;
}

inline int __float_as_int(float x) {
  int bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline unsigned __float_as_uint(float x) {
  return static_cast<unsigned>(__float_as_int(x));
}
inline float __uint_as_float(unsigned bits) {
  return __int_as_float(static_cast<int>(bits));
}

inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}

inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __logf(float x) {
  return std::log(x);
}

// Device-only in NVIDIA's headers; one rounding, by way of double.
inline __half __hfma(__half a, __half b, __half c) {
  const double product =
      static_cast<double>(__half2float(a)) * static_cast<double>(__half2float(b));
  return __double2half(product + static_cast<double>(__half2float(c)));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __halves2half2(__hfma(__low2half(a), __low2half(b), __low2half(c)),
                        __hfma(__high2half(a), __high2half(b), __high2half(c)));
}
