// Exponentials of vectors.
#pragma once

#include <cmath>

#include "common/simd.h"

namespace fastattn::FASTATTN_ISA {

inline constexpr double kLog2E = 1.44269504088896340736;
inline constexpr double kLn2 = 0.693147180559945309417;

// 2^x within 1.2 ulp for x <= 127; 0 below -126 and at -inf (no denormals, which would halve the
// speed of all that follows); NaN at NaN.
//
// x = n + f with n whole and |f| <= 1/2; 2^f is a polynomial of degree 6, and n is added to its
// exponent. Adding 1.5 * 2^23 leaves n in the lowest bits of the sum.
FASTATTN_INLINE Vec<float> exp2(Vec<float> x) {
  const Vec<float> shifted = x + 0x1.8p23f;
  const Vec<float> f = x - (shifted - 0x1.8p23f);
  Vec<float> p = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.0f;
  const auto exponent = bit_cast<Vec<uint32_t>>(shifted) << 23;
  const auto result = bit_cast<Vec<float>>(bit_cast<Vec<uint32_t>>(p) + exponent);
  return x < -126.0f ? Vec<float>{} : result;
}

FASTATTN_INLINE Vec<double> exp2(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = x[i] < -1022.0 ? 0.0 : std::exp2(x[i]);
  return x;
}

}  // namespace fastattn::FASTATTN_ISA
