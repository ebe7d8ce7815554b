// Kernels that use one helper of csrc/common or one built-in function each.
#pragma once

#include "common/mma.cuh"
#include "common/philox.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

using namespace fa;

struct LanguageParams {
  float* out;       // [32 or more]
  const float* x;   // [64]
  const __half* a;  // [16, 16]
  const __half* b;  // [16, 8]
  DropoutParams dropout;
  int64_t count;
  int32_t width;
};

// Each of four shuffles of x, one after the other in out.
__global__ void shuffles(FA_GRID_CONSTANT const LanguageParams p) {
  const float x = p.x[threadIdx.x];
  float* out = p.out + threadIdx.x;
  const int width = p.width;
  out[0] = __shfl_sync(kFullMask, x, 5, width);
  out[32] = __shfl_xor_sync(kFullMask, x, 6, width);
  out[64] = __shfl_up_sync(kFullMask, x, 3, width);
  out[96] = __shfl_down_sync(kFullMask, x, 3, width);
}

// Halves of a warp vote apart: bit 0 to 2 of out: any, all, and whether the ballot is that of odd
// x.
__global__ void votes(FA_GRID_CONSTANT const LanguageParams p) {
  const bool odd = static_cast<int>(p.x[threadIdx.x]) % 2 == 1;
  const uint32_t mask = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
  int seen = 0;
  if (threadIdx.x < 16)
    seen = __any_sync(mask, threadIdx.x == 3) + 2 * __all_sync(mask, true);
  else
    seen = __any_sync(mask, false) + 2 * __all_sync(mask, threadIdx.x == 17);
  if (__ballot_sync(kFullMask, odd) == 0xaaaaaaaau) seen += 4;
  p.out[threadIdx.x] = static_cast<float>(seen);
}

template <int kThreads>
__global__ void reductions(FA_GRID_CONSTANT const LanguageParams p) {
  SharedMemory shared;
  float* scratch = shared.take<float>(kThreads / 32);
  const float x = p.x[threadIdx.x % 64];
  const float sum = block_sum<kThreads>(x, scratch);
  const float largest = block_max<kThreads>(-x, scratch);
  if (threadIdx.x == 0) {
    p.out[0] = sum;
    p.out[1] = largest;
  }
  const float group = warp_sum(x, 8);
  if (threadIdx.x < 32) p.out[32 + threadIdx.x] = group;
}

// A row of `count` elements of T, from an element after x's start, moved through registers.
template <class T, int N>
__global__ void move_row(FA_GRID_CONSTANT const LanguageParams p) {
  float x[N];
  const auto* from = reinterpret_cast<const T*>(p.x) + 1 - p.width;
  auto* to = reinterpret_cast<T*>(p.out) + 1 - p.width;
  const int64_t first = N * static_cast<int64_t>(threadIdx.x);
  load_row(x, from + first, p.count - first);
  store_row(to + first, x, p.count - first);
}

__global__ void random_words(FA_GRID_CONSTANT const LanguageParams p) {
  const Dropout dropout(p.dropout);
  const uint4 words = dropout.words(threadIdx.x, 7u, 0xfffffffeu);
  store_global(reinterpret_cast<uint4*>(p.out) + threadIdx.x, words);
}

// c [16, 8] = a b on tensor cores, operands by way of ldmatrix.
template <int kDepth>
__global__ void multiply(FA_GRID_CONSTANT const LanguageParams p) {
  SharedMemory shared;
  __half* a = shared.take<__half>(256);
  __half* b = shared.take<__half>(128);
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) store_shared(a + i, p.a[i]);
  for (int i = lane; i < 128; i += 32) store_shared(b + i, p.b[i]);
  __syncwarp();
  float c[4] = {};
  if constexpr (kDepth == 16) {
    uint32_t left[4], right[2];
    ldmatrix<false>(left, a + lane % 16 * 16 + lane / 16 * 8);
    ldmatrix<true>(right, b + lane % 16 * 8);
    mma_m16n8k16<__half>(c, left, right);
  } else {
    for (int k = 0; k < 16; k += 8) {
      uint32_t left[2], right[1];
      ldmatrix<false>(left, a + lane % 16 * 16 + k);
      ldmatrix<true>(right, b + (k + lane % 8) * 8);
      mma_m16n8k8(c, left, right);
    }
  }
  for (int i = 0; i < 4; ++i) p.out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}

// x copied by cp.async, two groups in flight; the second half of the lanes asks for zeros.
__global__ void copies(FA_GRID_CONSTANT const LanguageParams p) {
  SharedMemory shared;
  float* tile = shared.take<float>(128);
  const int lane = threadIdx.x;
  copy_async(tile + 4 * lane, p.x + 4 * (lane % 16), lane < 16);
  commit_copies();
  commit_copies();
  wait_for_copies<1>();
  __syncwarp();
  for (int i = 0; i < 4; ++i) p.out[lane + 32 * i] = load_shared<float>(tile + lane + 32 * i);
}

// Each lane stores one float, `width` floats from its neighbour's.
__global__ void strided_store(FA_GRID_CONSTANT const LanguageParams p) {
  SharedMemory shared;
  store_shared(shared.take<float>(1152) + p.width * threadIdx.x, static_cast<float>(threadIdx.x));
}

// Each lane loads four floats, `width` floats from its neighbour's, of what nobody stored.
__global__ void strided_load(FA_GRID_CONSTANT const LanguageParams p) {
  SharedMemory shared;
  p.out[threadIdx.x] = load_shared<float4>(shared.take<float>(1152) + p.width * threadIdx.x).x;
}
