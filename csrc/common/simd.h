// Vectors as wide as the instruction-set level allows, on the vector extensions of GCC and Clang:
// operators (+ * < & ?:) come from the compiler, this file adds loads, stores and reductions.
// Intrinsics stand only where the extensions have no word for it or compile badly.
//
//   Vec<float> x = load<float>(bf16_pointer);     // converts; any alignment
//   Vec<float> t = load_partial<float>(p, n);     // n < lanes, the rest is `fill`
//   store(p, x); store_partial(p, x, n);          // one rounding to p's type
//
// A comparison gives a mask: an integer vector of 0 and -1, usable in `mask ? a : b` and with &.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/dtype.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FASTATTN_INLINE inline __attribute__((always_inline))

namespace fastattn::FASTATTN_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <class T, int kBytes>
struct VectorOf;
#define FASTATTN_VECTOR_(T)                              \
  template <int kBytes>                                  \
  struct VectorOf<T, kBytes> {                           \
    typedef T type __attribute__((vector_size(kBytes))); \
  };
FASTATTN_VECTOR_(float)
FASTATTN_VECTOR_(double)
FASTATTN_VECTOR_(uint8_t)
FASTATTN_VECTOR_(uint16_t)
FASTATTN_VECTOR_(int32_t)
FASTATTN_VECTOR_(uint32_t)
FASTATTN_VECTOR_(int64_t)
FASTATTN_VECTOR_(uint64_t)
#undef FASTATTN_VECTOR_

template <class T>
using Vec = typename VectorOf<T, kVectorBytes>::type;
template <class T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

// N elements of T, whatever register that fills.
template <class T, int N>
using VecN = typename VectorOf<T, N* static_cast<int>(sizeof(T))>::type;

// Integers as wide as T.
template <class T>
using Int = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
template <class T>
using UInt = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

template <class T>
inline constexpr T kInfinity = static_cast<T>(__builtin_inff());

template <class T>
FASTATTN_INLINE T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
FASTATTN_INLINE T max(T a, T b) {
  return a < b ? b : a;
}

template <class To, class From>
FASTATTN_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

template <class T>
FASTATTN_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}

// v itself, which the compiler then can't fuse with the product that made it into one operation:
// for products whose rounding must be the same wherever they are formed.
template <class V>
FASTATTN_INLINE V rounded(V v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

// 0, 1, 2, ...
template <class T>
FASTATTN_INLINE Vec<T> iota() {
  Vec<T> v{};
  for (int i = 0; i < kLanes<T>; ++i) v[i] = static_cast<T>(i);
  return v;
}

// All ones in the first n lanes; n may be negative or beyond the last lane.
template <class T>
FASTATTN_INLINE Vec<Int<T>> first_lanes(int64_t n) {
  const int64_t clamped = min<int64_t>(max<int64_t>(n, 0), kLanes<T>);
  return iota<Int<T>>() < static_cast<Int<T>>(clamped);
}

// ---- conversion of one vector --------------------------------------------------------------

FASTATTN_INLINE Vec<float> widen(VecN<uint16_t, kLanes<float>> bits, bfloat16) {
  return bit_cast<Vec<float>>(__builtin_convertvector(bits, Vec<uint32_t>) << 16);
}

// Round to nearest even; NaN stays NaN. (The instruction makes denormals zero.)
FASTATTN_INLINE VecN<uint16_t, kLanes<float>> narrow(Vec<float> x, bfloat16) {
#if defined(__AVX512BF16__)
  return bit_cast<VecN<uint16_t, kLanes<float>>>(_mm512_cvtneps_pbh(bit_cast<__m512>(x)));
#else
  const auto bits = bit_cast<Vec<uint32_t>>(x);
  const Vec<uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Vec<uint32_t> quiet = (bits >> 16) | 0x40u;
  return __builtin_convertvector(x == x ? rounded : quiet, VecN<uint16_t, kLanes<float>>);
#endif
}

FASTATTN_INLINE Vec<float> widen(VecN<uint16_t, kLanes<float>> half, float16) {
#if defined(__AVX512F__)
  return bit_cast<Vec<float>>(_mm512_cvtph_ps(bit_cast<__m256i>(half)));
#elif defined(__AVX2__)
  return bit_cast<Vec<float>>(_mm256_cvtph_ps(bit_cast<__m128i>(half)));
#else
  const auto bits = __builtin_convertvector(half, Vec<uint32_t>);
  const Vec<uint32_t> magnitude = (bits & 0x7fffu) << 13;
  // The exponent bias differs by 112; the product also brings denormals to where they belong.
  const auto scaled = bit_cast<Vec<uint32_t>>(bit_cast<Vec<float>>(magnitude) * 0x1p112f);
  const Vec<uint32_t> special = magnitude | 0x7f800000u;
  const auto finite = bit_cast<Vec<int32_t>>(magnitude) < 0x0f800000;
  return bit_cast<Vec<float>>((finite ? scaled : special) | ((bits & 0x8000u) << 16));
#endif
}

// Round to nearest even, to infinity beyond 65519.
FASTATTN_INLINE VecN<uint16_t, kLanes<float>> narrow(Vec<float> x, float16) {
#if defined(__AVX512F__)
  return bit_cast<VecN<uint16_t, kLanes<float>>>(
      _mm512_cvtps_ph(bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  return bit_cast<VecN<uint16_t, kLanes<float>>>(
      _mm256_cvtps_ph(bit_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
#else
  const auto bits = bit_cast<Vec<uint32_t>>(x);
  const Vec<uint32_t> magnitude = bits & 0x7fffffffu;
  const Vec<uint32_t> normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves the denormal half, rounded, in the lowest bits of the sum.
  const auto shifted = bit_cast<Vec<uint32_t>>(bit_cast<Vec<float>>(magnitude) + 0.5f);
  const Vec<uint32_t> denormal = shifted - 0x3f000000u;
  const Vec<uint32_t> infinite = Vec<uint32_t>{} + 0x7c00u;
  const auto m = bit_cast<Vec<int32_t>>(magnitude);
  Vec<uint32_t> half = m < 0x38800000 ? denormal : normal;
  half = m < 0x47800000 ? half : infinite;
  half = x == x ? half : infinite | 0x200u;
  return __builtin_convertvector(half | ((bits >> 16) & 0x8000u), VecN<uint16_t, kLanes<float>>);
#endif
}

// ---- loads and stores ----------------------------------------------------------------------

template <class V>
FASTATTN_INLINE V load_raw(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// Loads as float take float and the halves, loads as double take double and float.
template <class C, class S>
inline constexpr bool kCanLoad =
    std::is_same_v<C, double> ? sizeof(S) >= 4 : !std::is_same_v<S, double>;

// kLanes<C> elements of type S as a vector of C (float or double).
template <class C, class S>
FASTATTN_INLINE Vec<C> load(const S* p) {
  if constexpr (std::is_same_v<C, S>) {
    return load_raw<Vec<C>>(p);
  } else if constexpr (sizeof(S) == 2) {
    return widen(load_raw<VecN<uint16_t, kLanes<float>>>(p), S{});
  } else {
    return __builtin_convertvector(load_raw<VecN<S, kLanes<C>>>(p), Vec<C>);
  }
}

// The first n elements, 0 <= n <= lanes; nothing beyond them is read.
template <class C, class S>
FASTATTN_INLINE Vec<C> load_partial(const S* p, int64_t n, C fill = 0) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<C, float> && std::is_same_v<S, float>) {
    const auto mask = static_cast<__mmask16>((1u << n) - 1);
    return bit_cast<Vec<float>>(_mm512_mask_loadu_ps(_mm512_set1_ps(fill), mask, p));
  }
#endif
  S buffer[kLanes<C>] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return first_lanes<C>(n) ? load<C>(buffer) : splat(fill);
}

// The first n <= lanes elements that lie `stride` apart.
template <class C, class S>
FASTATTN_INLINE Vec<C> load_strided(const S* p, int64_t stride, int64_t n, C fill = 0) {
  S buffer[kLanes<C>] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i * stride];
  return first_lanes<C>(n) ? load<C>(buffer) : splat(fill);
}

// One element, converted.
template <class C, class S>
FASTATTN_INLINE C load_scalar(const S* p) {
  if constexpr (sizeof(S) == 2) {
    S buffer[kLanes<C>] = {*p};
    return load<C>(buffer)[0];
  } else {
    return static_cast<C>(*p);
  }
}

template <class C, class S>
FASTATTN_INLINE void store(S* p, C v) {
  if constexpr (sizeof(S) == 2) {
    const auto bits = narrow(v, S{});
    __builtin_memcpy(p, &bits, sizeof bits);
  } else {
    static_assert(sizeof(v[0]) == sizeof(S));
    __builtin_memcpy(p, &v, sizeof v);
  }
}

// Stores past the caches, for results too large to be read back from them; p is aligned to the
// vector. Call finish_streaming() before another thread may read them.
template <class V, class S>
FASTATTN_INLINE void store_streaming(S* p, V v) {
#if defined(__x86_64__)
  static_assert(sizeof(v[0]) == sizeof(S));
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bit_cast<__m512i>(v));
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bit_cast<__m256i>(v));
#else
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), bit_cast<__m128i>(v));
#endif
#else
  store(p, v);
#endif
}

FASTATTN_INLINE void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// The first n elements, 0 <= n <= lanes; nothing beyond them is written.
template <class V, class S>
FASTATTN_INLINE void store_partial(S* p, V v, int64_t n) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<S, float>) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), bit_cast<__m512>(v));
    return;
  }
#endif
  S buffer[sizeof(V) / sizeof(v[0])];
  store(buffer, v);
  for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

// n booleans (bytes) as a mask; they lie `stride` apart.
template <class T>
FASTATTN_INLINE Vec<Int<T>> load_mask(const bool* p, int64_t stride, int64_t n) {
  uint8_t buffer[kLanes<T>] = {};
  if (n == kLanes<T> && stride == 1) {
    __builtin_memcpy(buffer, p, sizeof buffer);
  } else {
    for (int64_t i = 0; i < n; ++i) buffer[i] = static_cast<uint8_t>(p[i * stride]);
  }
  const auto bytes = load_raw<VecN<uint8_t, kLanes<T>>>(buffer);
  return __builtin_convertvector(bytes, Vec<Int<T>>) != 0;
}

// ---- across lanes --------------------------------------------------------------------------

template <int kBy, class V, int... kIndex>
FASTATTN_INLINE V rotate_(V v, std::integer_sequence<int, kIndex...>) {
  constexpr int n = sizeof...(kIndex);
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(v, v, ((kIndex + kBy) % n)...);
#else
  return V{v[(kIndex + kBy) % n]...};
#endif
}

template <int kBy, class V>
FASTATTN_INLINE V rotate(V v) {
  return rotate_<kBy>(v, std::make_integer_sequence<int, sizeof(V) / sizeof(v[0])>{});
}

template <class V, class Op>
FASTATTN_INLINE auto reduce(V v, Op op) {
  constexpr int n = sizeof(V) / sizeof(v[0]);
  if constexpr (n >= 16) v = op(v, rotate<8>(v));
  if constexpr (n >= 8) v = op(v, rotate<4>(v));
  if constexpr (n >= 4) v = op(v, rotate<2>(v));
  v = op(v, rotate<1>(v));
  return v[0];
}

template <class V>
FASTATTN_INLINE auto reduce_sum(V v) {
  return reduce(v, [](V a, V b) __attribute__((always_inline)) { return a + b; });
}

// Lanes where either is NaN take b's value, as the x86 instruction does.
template <class V>
FASTATTN_INLINE V vmax(V a, V b) {
  return a > b ? a : b;
}

template <class V>
FASTATTN_INLINE auto reduce_max(V v) {
  return reduce(v, [](V a, V b) __attribute__((always_inline)) { return vmax(a, b); });
}

}  // namespace fastattn::FASTATTN_ISA
