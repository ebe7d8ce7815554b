// The inner loop of the products: a block of C as large as the registers allow.
#pragma once

#include "common/simd.h"

namespace fastattn::FASTATTN_ISA {

// What is multiplied. A Unit is what one step of the inner dimension takes from A and from each
// column of B: kPack numbers of type Number.
template <class T>
struct Plain {
  using Number = T;
  using Unit = T;
  using Sum = T;
  static constexpr int kPack = 1;
  static FASTATTN_INLINE void add_product(Vec<T>& sum, Vec<T> a, Vec<T> b) { sum += a * b; }
};

#if defined(__AVX512BF16__)
struct BFloat16Pairs {
  using Number = bfloat16;
  using Unit = uint32_t;
  using Sum = float;
  static constexpr int kPack = 2;
  static FASTATTN_INLINE void add_product(Vec<float>& sum, Vec<uint32_t> a, Vec<uint32_t> b) {
    sum = bit_cast<Vec<float>>(
        _mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(a), bit_cast<__m512bh>(b)));
  }
};
#endif

// Rows of C held in registers, two vectors wide: 16 of 32 registers, 12 of 16 elsewhere; the rest
// is for B and A.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kTileRows = 8;
#else
inline constexpr int kTileRows = 6;
#endif

// Columns of C, and of the panels that B comes in.
template <class T>
inline constexpr int kPanel = 2 * kLanes<T>;

// a(m, k) of a product: k runs through `segments` of `steps` each. Strides are in Units.
template <class Unit>
struct LeftOperand {
  const Unit* data;
  int64_t row_stride;
  int64_t step_stride;
  int64_t steps;
  int64_t segments = 1;
  int64_t segment_stride = 0;
};

// kRowStride: a's, where it is known when compiling; it saves address registers. Else 0.
template <class Math, int kRows, int kRowStride>
void multiply_tile(const LeftOperand<typename Math::Unit>& a, const typename Math::Unit* b,
                   typename Math::Sum* c, int64_t c_stride, bool add) {
  using Unit = typename Math::Unit;
  using Sum = typename Math::Sum;
  constexpr int w = kLanes<Sum>;
  Vec<Sum> sum[kRows][2];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    sum[i][0] = sum[i][1] = Vec<Sum>{};
    if (add) {
      __builtin_prefetch(c + i * c_stride);
      __builtin_prefetch(c + i * c_stride + 2 * w - 1);
    }
  }

  const int64_t row_stride = kRowStride > 0 ? kRowStride : a.row_stride;
  for (int64_t segment = 0; segment < a.segments; ++segment) {
    // Every third row has a pointer of its own, so that one register serves the other two.
    const Unit* third[(kRows + 2) / 3];
#pragma GCC unroll 3
    for (int i = 0; i < (kRows + 2) / 3; ++i)
      third[i] = a.data + segment * a.segment_stride + 3 * i * row_stride;
#pragma GCC unroll 1
    for (int64_t step = 0; step < a.steps; ++step) {
      const auto b0 = load_raw<Vec<Unit>>(b), b1 = load_raw<Vec<Unit>>(b + w);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const Vec<Unit> a_i = splat(third[i / 3][i % 3 * row_stride]);
        Math::add_product(sum[i][0], a_i, b0);
        Math::add_product(sum[i][1], a_i, b1);
      }
#pragma GCC unroll 3
      for (int i = 0; i < (kRows + 2) / 3; ++i) third[i] += a.step_stride;
      b += 2 * w;
    }
  }

#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < 2; ++j) {
      Sum* to = c + i * c_stride + j * w;
      store(to, add ? load<Sum>(to) + sum[i][j] : sum[i][j]);
    }
}

// c[m][n] = sum_k a(m, k) b[k][n], added to what is there with `add`, for m < rows and the kPanel
// columns n of one panel b[k][kPanel]. An element's sum runs over k in ascending order.
template <class Math, int kRowStride>
void multiply(int64_t rows, LeftOperand<typename Math::Unit> a, const typename Math::Unit* b,
              typename Math::Sum* c, int64_t c_stride, bool add) {
  const int64_t row_stride = kRowStride > 0 ? kRowStride : a.row_stride;
  const auto run = [&](auto count) {
    constexpr int n = decltype(count)::value;
    for (; rows >= n; rows -= n) {
      multiply_tile<Math, n, kRowStride>(a, b, c, c_stride, add);
      a.data += n * row_stride;
      c += n * c_stride;
    }
  };
  run(std::integral_constant<int, kTileRows>{});
  run(std::integral_constant<int, 4>{});
  run(std::integral_constant<int, 2>{});
  run(std::integral_constant<int, 1>{});
}

}  // namespace fastattn::FASTATTN_ISA
