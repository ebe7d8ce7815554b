// Storage types and fp32: values are widened at the load and rounded once, to nearest even, at the
// store.
#pragma once

#include "common/port.cuh"

namespace fa {

FA_DEVICE float to_float(float x) {
  return x;
}
FA_DEVICE float to_float(__half x) {
  return __half2float(x);
}
FA_DEVICE float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <class T>
FA_DEVICE T from_float(float x);
template <>
FA_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
FA_DEVICE __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
FA_DEVICE __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// 2^x by the card's special-function unit (2 ulp; results below 2^-126 become 0).
FA_DEVICE float fast_exp2(float x) {
#ifdef FASTATTN_EMULATOR
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// log2(x) by the card's special-function unit.
FA_DEVICE float fast_log2(float x) {
#ifdef FASTATTN_EMULATOR
  return std::log2(x);
#else
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

constexpr float kLog2E = 1.4426950408889634f;  // log2(e)
constexpr float kLn2 = 0.6931471805599453f;

FA_DEVICE float infinity() {
  return __int_as_float(0x7f800000);
}

}  // namespace fa
