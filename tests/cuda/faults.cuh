// Kernels with one fault each, which the emulator has to find.
#pragma once

#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

struct FaultParams {
  float* out;      // [64]
  const float* x;  // [64]
};

using namespace fa;

#define FAULT(name) __global__ void name(FA_GRID_CONSTANT const FaultParams p)

// ---- without a fault
FAULT(none) {
  SharedMemory shared;
  float* tile = shared.take<float>(64);
  store_shared(tile + threadIdx.x, p.x[threadIdx.x]);
  __syncthreads();
  const float next = load_shared<float>(tile + (threadIdx.x + 1) % 64);
  const float lane = __shfl_xor_sync(kFullMask, next, 1);
  p.out[threadIdx.x] = block_sum<64>(lane, shared.take<float>(2)) + next;
}

// ---- races
FAULT(missing_barrier) {
  SharedMemory shared;
  float* tile = shared.take<float>(64);
  store_shared(tile + threadIdx.x, p.x[threadIdx.x]);
  p.out[threadIdx.x] = load_shared<float>(tile + (threadIdx.x + 32) % 64);
}

FAULT(missing_barrier_plain) {
  SharedMemory shared;
  float* tile = shared.take<float>(64);
  tile[threadIdx.x] = p.x[threadIdx.x];
  p.out[threadIdx.x] = tile[(threadIdx.x + 32) % 64];
}

FAULT(missing_barrier_before_store) {
  SharedMemory shared;
  float* tile = shared.take<float>(64);
  store_shared(tile + threadIdx.x, p.x[threadIdx.x]);
  __syncthreads();
  p.out[threadIdx.x] = load_shared<float>(tile + (threadIdx.x + 32) % 64);
  store_shared(tile + threadIdx.x, 1.0f);
}

FAULT(missing_syncwarp) {
  SharedMemory shared;
  float* tile = shared.take<float>(64);
  store_shared(tile + threadIdx.x, p.x[threadIdx.x]);
  p.out[threadIdx.x] = load_shared<float>(tile + (threadIdx.x ^ 1));
}

FAULT(two_store) {
  SharedMemory shared;
  float* tile = shared.take<float>(64);
  store_shared(tile + threadIdx.x / 2, p.x[threadIdx.x]);
  p.out[threadIdx.x] = 0;
}

// ---- bounds and alignment
FAULT(shared_overrun) {
  SharedMemory shared;
  float* tile = shared.take<float>(32);
  shared.take<float>(64);
  store_shared(tile + threadIdx.x, 1.0f);
}

FAULT(shared_overrun_plain) {
  SharedMemory shared;
  float* tile = shared.take<float>(32);
  shared.take<float>(64);
  tile[threadIdx.x] = 1.0f;
}

FAULT(shared_too_small) {
  SharedMemory shared;
  store_shared(shared.take<float>(1024) + threadIdx.x, 1.0f);
}

FAULT(shared_divided_differently) {
  SharedMemory shared;
  store_shared(shared.take<float>(threadIdx.x < 32 ? 64 : 32) + threadIdx.x % 32, 1.0f);
}

FAULT(shared_misaligned) {
  SharedMemory shared;
  const float* tile = shared.take<float>(65);
  p.out[threadIdx.x] = load_shared<float4>(tile + 1).x;
}

FAULT(global_misaligned) {
  p.out[threadIdx.x] = load_global<float4>(p.x + 1).x;
}

FAULT(global_misaligned_plain) {
  p.out[threadIdx.x] = reinterpret_cast<const float4*>(p.x + 1)->x;
}

FAULT(global_overrun) {
  p.out[threadIdx.x] = p.x[threadIdx.x + 8];
}

// ---- barriers and collectives
FAULT(divergent_barrier) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}

FAULT(exited_thread_at_barrier) {
  if (threadIdx.x == 5) return;
  __syncthreads();
}

FAULT(barrier_and_collective) {
  if (threadIdx.x < 16)
    __syncwarp();
  else
    __syncthreads();
}

FAULT(divergent_collective) {
  float x = 1;
  if (threadIdx.x % 32 < 16)
    x = __shfl_xor_sync(kFullMask, x, 1);
  else
    x = __shfl_down_sync(kFullMask, x, 1);
  p.out[threadIdx.x] = x;
}

FAULT(exited_lane) {
  if (threadIdx.x == 40) return;
  p.out[threadIdx.x] = __shfl_xor_sync(kFullMask, 1.0f, 1);
}

FAULT(lane_outside_mask) {
  p.out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 1);
}

FAULT(masks_that_overlap) {
  const uint32_t mask = threadIdx.x % 32 < 16 ? 0x1ffffu : 0xffff0000u;
  p.out[threadIdx.x] = __shfl_xor_sync(mask, 1.0f, 1);
}

FAULT(source_outside_mask) {
  const uint32_t mask = threadIdx.x % 32 < 16 ? 0xffffu : 0xffff0000u;
  p.out[threadIdx.x] = __shfl_xor_sync(mask, 1.0f, 16);
}

// ---- asynchronous copies, tensor cores
FAULT(missing_wait) {
  SharedMemory shared;
  float* tile = shared.take<float>(256);
  copy_async(tile + 4 * threadIdx.x, p.x + 4 * (threadIdx.x % 16), true);
  commit_copies();
  __syncthreads();
  p.out[threadIdx.x] = load_shared<float>(tile + 4 * threadIdx.x);
  wait_for_copies<0>();
}

FAULT(never_waited) {
  SharedMemory shared;
  copy_async(shared.take<float>(256) + 4 * threadIdx.x, p.x, true);
}

FAULT(copy_misaligned) {
  SharedMemory shared;
  copy_async(shared.take<float>(260) + 4 * threadIdx.x, p.x + 1, true);
}

FAULT(tensor_cores_of_a_later_card) {
  float c[4] = {};
  const uint32_t a[2] = {}, b[1] = {};
  mma_m16n8k8(c, a, b);
}
