// What every kernel with dropout is told; packed by fastattn/_cuda/params.py.
#pragma once

#include "common/port.cuh"

namespace fa {

struct DropoutParams {
  const int64_t* rng_state;  // [2] seed, offset, on the device; null where p is 0
  uint32_t threshold;        // floor(p * 2^32), at most 2^32 - 1
  float scale;               // 1 / (1 - p); 0 for p = 1, which keeps nothing
};

}  // namespace fa
