// The inner loop of every matrix product of attention: a block of C as large as the registers
// allow, over a panel of B whose rows are kPanel columns wide.
//
// A `Math` says what is multiplied. Its Unit is what one step of the inner dimension takes from A
// and from each column of B: one number, or a pair of bfloat16.
#pragma once

#include "common/simd.h"

namespace fastattn::FASTATTN_ISA {

struct Float32Math {
  using Unit = float;
  using Sum = float;
  static constexpr int kPack = 1;
  static FASTATTN_INLINE void add_product(Vec<float>& sum, Vec<float> a, Vec<float> b) {
    sum += a * b;
  }
};

struct Float64Math {
  using Unit = double;
  using Sum = double;
  static constexpr int kPack = 1;
  static FASTATTN_INLINE void add_product(Vec<double>& sum, Vec<double> a, Vec<double> b) {
    sum += a * b;
  }
};

#if defined(__AVX512BF16__)
// Two bfloat16 a step, products and sums in float: twice the speed of Float32Math.
struct BFloat16Math {
  using Unit = uint32_t;
  using Sum = float;
  static constexpr int kPack = 2;
  static FASTATTN_INLINE void add_product(Vec<float>& sum, Vec<uint32_t> a, Vec<uint32_t> b) {
    sum = bit_cast<Vec<float>>(
        _mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(a), bit_cast<__m512bh>(b)));
  }
};
#endif

// Rows and vectors of C held in registers: 16 of 32 where there are 32, 12 of 16 elsewhere, the
// rest for B, for A, and for products where there is no fused multiply-add.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kTileRows = 8;
#else
inline constexpr int kTileRows = 6;
#endif
inline constexpr int kTileVectors = 2;

// Columns of a panel.
template <class Unit>
inline constexpr int kPanel = kTileVectors * kLanes<Unit>;

template <class Math, int kRows, bool kAdd>
void multiply_tile(int64_t steps, const typename Math::Unit* a, int64_t row_stride,
                   int64_t step_stride, const typename Math::Unit* b, int64_t b_stride,
                   typename Math::Sum* c, int64_t c_stride) {
  using Unit = typename Math::Unit;
  using Sum = typename Math::Sum;
  Vec<Sum> sum[kRows][kTileVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kTileVectors; ++j) sum[i][j] = Vec<Sum>{};
  }
  // Every third row has a pointer of its own, which leaves enough registers for the addresses.
  const Unit* third[(kRows + 2) / 3];
#pragma GCC unroll 3
  for (int i = 0; i < (kRows + 2) / 3; ++i) third[i] = a + 3 * i * row_stride;

#pragma GCC unroll 1
  for (int64_t step = 0; step < steps; ++step) {
    Vec<Unit> b_row[kTileVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kTileVectors; ++j) b_row[j] = load_raw<Vec<Unit>>(b + j * kLanes<Unit>);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec<Unit> a_i = splat(third[i / 3][i % 3 * row_stride]);
#pragma GCC unroll 2
      for (int j = 0; j < kTileVectors; ++j) Math::add_product(sum[i][j], a_i, b_row[j]);
    }
#pragma GCC unroll 3
    for (int i = 0; i < (kRows + 2) / 3; ++i) third[i] += step_stride;
    b += b_stride;
  }

#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kTileVectors; ++j) {
      Sum* to = c + i * c_stride + j * kLanes<Sum>;
      store(to, kAdd ? load<Sum>(to) + sum[i][j] : sum[i][j]);
    }
  }
}

// c[m][n] = sum_k a(m, k) b[k][n], or += with kAdd, for `rows` <= kTileRows and one panel of
// columns; a(m, k) = a[m * row_stride + k * step_stride]. Sums run over k in ascending order, so
// an element doesn't depend on how the rows are cut into tiles; with kAdd, the sum is added as a
// whole.
template <class Math, bool kAdd>
__attribute__((noinline)) void multiply_panel(int rows, int64_t steps, const typename Math::Unit* a,
                                              int64_t row_stride, int64_t step_stride,
                                              const typename Math::Unit* b, int64_t b_stride,
                                              typename Math::Sum* c, int64_t c_stride) {
  const auto run = [&](auto count) __attribute__((always_inline)) {
    multiply_tile<Math, decltype(count)::value, kAdd>(steps, a, row_stride, step_stride, b,
                                                      b_stride, c, c_stride);
  };
  switch (rows) {
    case 1:
      return run(std::integral_constant<int, 1>{});
    case 2:
      return run(std::integral_constant<int, 2>{});
    case 3:
      return run(std::integral_constant<int, 3>{});
    case 4:
      return run(std::integral_constant<int, 4>{});
    case 5:
      return run(std::integral_constant<int, 5>{});
    case 6:
      return run(std::integral_constant<int, 6>{});
#if defined(__AVX512F__) || defined(__aarch64__)
    case 7:
      return run(std::integral_constant<int, 7>{});
    case 8:
      return run(std::integral_constant<int, 8>{});
#endif
    default:
      __builtin_unreachable();
  }
}

// The same for any number of rows and of panels: c is [rows][panels * kPanel].
template <class Math, bool kAdd>
void multiply(int64_t rows, int64_t steps, int64_t panels, const typename Math::Unit* a,
              int64_t row_stride, int64_t step_stride, const typename Math::Unit* b,
              int64_t b_stride, int64_t b_panel_stride, typename Math::Sum* c, int64_t c_stride) {
  for (int64_t p = 0; p < panels; ++p) {
    for (int64_t m = 0; m < rows; m += kTileRows)
      multiply_panel<Math, kAdd>(static_cast<int>(min<int64_t>(rows - m, kTileRows)), steps,
                                 a + m * row_stride, row_stride, step_stride,
                                 b + p * b_panel_stride, b_stride,
                                 c + m * c_stride + p * kPanel<typename Math::Unit>, c_stride);
  }
}

// A product that begins anew, over panels that lie one after the other ([panels][steps][kPanel]).
// A long sum is made of sums of at most 64 steps, which keeps its rounding error down.
template <class Math>
void multiply_panels(int64_t rows, int64_t steps, int64_t panels, const typename Math::Unit* a,
                     int64_t row_stride, const typename Math::Unit* b, typename Math::Sum* c,
                     int64_t c_stride) {
  constexpr int width = kPanel<typename Math::Unit>;
  const int64_t parts = max<int64_t>((steps + 63) / 64, 1), most = (steps + parts - 1) / parts;
  for (int64_t step = 0; step == 0 || step < steps; step += most) {
    const auto product = step == 0 ? multiply<Math, false> : multiply<Math, true>;
    product(rows, min(most, steps - step), panels, a + step, row_stride, 1, b + step * width, width,
            steps * width, c, c_stride);
    if (most == 0) break;
  }
}

}  // namespace fastattn::FASTATTN_ISA
