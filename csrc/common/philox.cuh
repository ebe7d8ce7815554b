// Dropout's random numbers in kernels: the words and rules of common/philox.h, bit for bit.
// One call of philox() costs 7 rounds of two 32 x 32 -> 64-bit products, and gives 4 columns.
#pragma once

#include "common/dropout_params.cuh"
#include "common/port.cuh"

namespace fa {

// The four words of counter (c0, c1, c2, c3) under a key of two words.
FA_DEVICE uint4 philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                       uint32_t k1) {
  FA_UNROLL
  for (int round = 0; round < 7; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

// A kernel's dropout, its seed and offset read from the device.
struct Dropout {
  uint32_t k0, k1, offset, threshold;
  float scale;  // of kept elements; 0 keeps none

  FA_DEVICE explicit Dropout(const DropoutParams& p) : threshold(p.threshold), scale(p.scale) {
    const auto seed = static_cast<uint64_t>(p.rng_state[0]);
    k0 = static_cast<uint32_t>(seed);
    k1 = static_cast<uint32_t>(seed >> 32);
    offset = static_cast<uint32_t>(p.rng_state[1]);
  }

  // The words of columns 4 * group .. 4 * group + 3 of the row named by two words.
  FA_DEVICE uint4 words(uint32_t group, uint32_t row1, uint32_t row2) const {
    return philox(group, row1, row2, offset, k0, k1);
  }

  FA_DEVICE bool keeps(uint32_t word) const { return word >= threshold && scale != 0.0f; }
};

}  // namespace fa
