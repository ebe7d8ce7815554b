// Sums and maxima over a warp or a block. Every lane, or thread, takes part and gets the result;
// the order of the operations is fixed, so results are the same from run to run.
#pragma once

#include "common/convert.cuh"

namespace fa {

constexpr uint32_t kFullMask = 0xffffffffu;

struct Sum {
  static FA_DEVICE float identity() { return 0.0f; }
  FA_DEVICE float operator()(float a, float b) const { return a + b; }
};

struct Max {
  static FA_DEVICE float identity() { return -infinity(); }
  FA_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Over groups of `width` neighbouring lanes, a power of 2.
template <class Combine>
FA_DEVICE float warp_reduce(float x, Combine combine, int width = 32) {
  FA_UNROLL
  for (int distance = 16; distance > 0; distance /= 2)
    if (distance < width) x = combine(x, __shfl_xor_sync(kFullMask, x, distance));
  return x;
}

FA_DEVICE float warp_sum(float x, int width = 32) {
  return warp_reduce(x, Sum(), width);
}
FA_DEVICE float warp_max(float x, int width = 32) {
  return warp_reduce(x, Max(), width);
}

// Over a block of kThreads; `scratch` is shared memory for kThreads / 32 floats, free for another
// use after the next __syncthreads.
template <int kThreads, class Combine>
FA_DEVICE float block_reduce(float x, float* scratch, Combine combine) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps");
  constexpr int kWarps = kThreads / 32;
  x = warp_reduce(x, combine);
  if constexpr (kWarps > 1) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    if (lane == 0) store_shared(scratch + warp, x);
    __syncthreads();
    x = lane < kWarps ? load_shared<float>(scratch + lane) : Combine::identity();
    x = warp_reduce(x, combine);
  }
  return x;
}

template <int kThreads>
FA_DEVICE float block_sum(float x, float* scratch) {
  return block_reduce<kThreads>(x, scratch, Sum());
}

template <int kThreads>
FA_DEVICE float block_max(float x, float* scratch) {
  return block_reduce<kThreads>(x, scratch, Max());
}

}  // namespace fa
