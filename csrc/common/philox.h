// Dropout's random numbers: Philox4x32 with 7 rounds (Salmon et al. 2011, "Parallel random
// numbers: as easy as 1, 2, 3"), addressed by position, so that a mask is never stored and is the
// same bit for bit on every backend.
//
//   key     = seed, as two words
//   counter = (column >> 2, row word 1, row word 2, offset);  column & 3 picks the word
//   keep    = word >= floor(p * 2^32);  p = 1 keeps nothing
//
// Attention: column = key index, row words = (query index, batch * heads + head). Row-wise ops:
// row words = the row's low and high word.
#pragma once

#include <cstdint>

#include "common/tensor_view.h"

#ifdef FASTATTN_ISA
#include "common/simd.h"
#endif

namespace fastattn {

// What the ops pass to their kernels. p == 0: no dropout, and the rest is unused.
struct Dropout {
  double p = 0;
  uint64_t seed = 0;
  uint32_t offset = 0;
};

// From an op's arguments: rng_state is int64 [2] (seed, offset), or absent where p is 0.
inline Dropout read_dropout(const TensorView& rng_state, double p) {
  if (p == 0) return {};
  const auto* words = rng_state.as<const int64_t>();
  return {p, static_cast<uint64_t>(words[0]), static_cast<uint32_t>(words[rng_state.stride[0]])};
}

#ifdef FASTATTN_ISA
namespace FASTATTN_ISA {

// What kept elements are multiplied by.
template <class C>
FASTATTN_INLINE C keep_scale(const Dropout& dropout) {
  return static_cast<C>(dropout.p < 1 ? 1 / (1 - dropout.p) : 0);
}

// The 64-bit products of the low halves of 64-bit lanes.
FASTATTN_INLINE Vec<uint64_t> multiply_low(Vec<uint64_t> a, Vec<uint64_t> b) {
#if defined(__AVX512F__)
  return bit_cast<Vec<uint64_t>>(_mm512_mul_epu32(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return bit_cast<Vec<uint64_t>>(_mm256_mul_epu32(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#elif defined(__x86_64__)
  return bit_cast<Vec<uint64_t>>(_mm_mul_epu32(bit_cast<__m128i>(a), bit_cast<__m128i>(b)));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// The keep masks of one row, a block of kColumns columns at a time.
class DropoutRow {
 public:
  // Two independent chains of rounds hide each other's latency; a chain gives two vectors.
  static constexpr int kChains = 2;
  static constexpr int kVectors = 2 * kChains;
  static constexpr int kColumns = kVectors * kLanes<uint32_t>;

  DropoutRow(const Dropout& dropout, uint32_t row1, uint32_t row2)
      : row1_(row1), row2_(row2), offset_(dropout.offset) {
    auto k0 = static_cast<uint32_t>(dropout.seed), k1 = static_cast<uint32_t>(dropout.seed >> 32);
    for (auto& key : key_) {
      key[0] = k0;
      key[1] = k1;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const double scaled = dropout.p * 4294967296.0;
    keep_none_ = scaled >= 4294967296.0;
    threshold_ = keep_none_ ? 0xffffffffu : static_cast<uint32_t>(scaled);
  }

  // The words of columns [column, column + kColumns), in order; column is a multiple of 4.
  FASTATTN_INLINE void words(uint64_t column, Vec<uint32_t> (&out)[kVectors]) const {
    // Counters sit in the low halves of 64-bit lanes; the high halves may hold anything, which
    // saves putting products back together. Lane l takes the counter that makes the two
    // interleaves at the end give ascending columns.
    constexpr int n = kLanes<uint64_t>;
    Vec<uint64_t> lane{};
    for (int l = 0; l < n; ++l) lane[l] = static_cast<uint64_t>((l >> 1) + (l & 1) * (n / 2));
    Vec<uint64_t> c0[kChains], c1[kChains], c2[kChains], c3[kChains];
    for (int i = 0; i < kChains; ++i) {
      c0[i] = lane + (column >> 2) + static_cast<uint64_t>(i * n);
      c1[i] = splat<uint64_t>(row1_);
      c2[i] = splat<uint64_t>(row2_);
      c3[i] = splat<uint64_t>(offset_);
    }
#pragma GCC unroll 7
    for (const auto& key : key_) {
#pragma GCC unroll 2
      for (int i = 0; i < kChains; ++i) {
        const Vec<uint64_t> p0 = multiply_low(c0[i], splat<uint64_t>(0xD2511F53u));
        const Vec<uint64_t> p1 = multiply_low(c2[i], splat<uint64_t>(0xCD9E8D57u));
        c0[i] = (p1 >> 32) ^ c1[i] ^ splat(key[0]);
        c2[i] = (p0 >> 32) ^ c3[i] ^ splat(key[1]);
        c1[i] = p1;
        c3[i] = p0;
      }
    }
    for (int i = 0; i < kChains; ++i) {
      const Vec<uint64_t> w01 = (c0[i] & 0xffffffffu) | (c1[i] << 32);
      const Vec<uint64_t> w23 = (c2[i] & 0xffffffffu) | (c3[i] << 32);
      out[2 * i] = bit_cast<Vec<uint32_t>>(interleave<0>(w01, w23));
      out[2 * i + 1] = bit_cast<Vec<uint32_t>>(interleave<1>(w01, w23));
    }
  }

  // Masks of the same columns: -1 keep, 0 drop.
  FASTATTN_INLINE void keep(uint64_t column, Vec<int32_t> (&mask)[kVectors]) const {
    Vec<uint32_t> word[kVectors];
    words(column, word);
    for (int i = 0; i < kVectors; ++i)
      mask[i] = keep_none_ ? Vec<int32_t>{} : word[i] >= splat(threshold_);
  }

  // The same for vectors of doubles.
  FASTATTN_INLINE void keep(uint64_t column, Vec<int64_t> (&mask)[2 * kVectors]) const {
    Vec<int32_t> narrow[kVectors];
    keep(column, narrow);
    VecN<int32_t, kLanes<int64_t>> half[2 * kVectors];
    __builtin_memcpy(half, narrow, sizeof half);
    for (int i = 0; i < 2 * kVectors; ++i) mask[i] = __builtin_convertvector(half[i], Vec<int64_t>);
  }

 private:
  // Even (kOdd = 0) or odd 64-bit lanes of a and b in turn.
  template <int kOdd>
  static FASTATTN_INLINE Vec<uint64_t> interleave(Vec<uint64_t> a, Vec<uint64_t> b) {
    return interleave_<kOdd>(a, b, std::make_integer_sequence<int, kLanes<uint64_t>>{});
  }
  template <int kOdd, int... kLane>
  static FASTATTN_INLINE Vec<uint64_t> interleave_(Vec<uint64_t> a, Vec<uint64_t> b,
                                                   std::integer_sequence<int, kLane...>) {
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(a, b, ((kLane & ~1) + kOdd + (kLane & 1) * kLanes<uint64_t>)...);
#else
    return Vec<uint64_t>{((kLane & 1) ? b : a)[(kLane & ~1) + kOdd]...};
#endif
  }

  uint32_t row1_, row2_, offset_, threshold_;
  uint64_t key_[7][2];  // of each round
  bool keep_none_;
};

}  // namespace FASTATTN_ISA
#endif

}  // namespace fastattn
