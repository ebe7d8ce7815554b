// Element types that tensors may hold, and the storage types of the two halves.
#pragma once

#include <cstdint>

namespace fastattn {

enum class DType : int32_t { none, float32, float64, float16, bfloat16, boolean, int32, int64 };

// Storage only: arithmetic happens in float after a load (see simd.h).
struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

template <class T>
inline constexpr DType kDTypeOf = DType::none;
template <>
inline constexpr DType kDTypeOf<float> = DType::float32;
template <>
inline constexpr DType kDTypeOf<double> = DType::float64;
template <>
inline constexpr DType kDTypeOf<float16> = DType::float16;
template <>
inline constexpr DType kDTypeOf<bfloat16> = DType::bfloat16;
template <>
inline constexpr DType kDTypeOf<bool> = DType::boolean;
template <>
inline constexpr DType kDTypeOf<int32_t> = DType::int32;
template <>
inline constexpr DType kDTypeOf<int64_t> = DType::int64;

// The type arithmetic is done in: double for double, float for everything else.
template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class T>
using Compute = typename ComputeOf<T>::type;

// Calls f(T{}) with the storage type of a floating dtype; returns false for any other dtype.
template <class F>
bool visit_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::float32:
      return f(float{}), true;
    case DType::float64:
      return f(double{}), true;
    case DType::float16:
      return f(float16{}), true;
    case DType::bfloat16:
      return f(bfloat16{}), true;
    default:
      return false;
  }
}

}  // namespace fastattn
