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

// Where a product goes: to = (from + sum) * factors[row]. Without `from` it begins anew, without
// `factors` nothing is multiplied. `from` may be `to`.
template <class Sum>
struct Target {
  Sum* to;
  int64_t to_stride;
  const Sum* from = nullptr;
  int64_t from_stride = 0;
  const Sum* factors = nullptr;

  Target at(int64_t row, int64_t column) const {
    return {to + row * to_stride + column, to_stride,
            from == nullptr ? nullptr : from + row * from_stride + column, from_stride,
            factors == nullptr ? nullptr : factors + row};
  }
};

// A sum that is kept where it is: set, or added to.
template <class Sum>
FASTATTN_INLINE Target<Sum> sum_in(Sum* data, int64_t stride, bool is_first) {
  return {data, stride, is_first ? nullptr : data, stride};
}

template <class Math, int kRows>
FASTATTN_INLINE void multiply_tile(int64_t steps, const typename Math::Unit* a, int64_t row_stride,
                                   int64_t step_stride, const typename Math::Unit* b,
                                   int64_t b_stride, const Target<typename Math::Sum>& c) {
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

  const auto each = [&](const auto& f) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kTileVectors; ++j) f(sum[i][j], i, j * kLanes<Sum>);
    }
  };
  if (c.from != nullptr) {
    each([&](Vec<Sum>& v, int i, int column) __attribute__((always_inline)) {
      v += load<Sum>(c.from + i * c.from_stride + column);
    });
  }
  if (c.factors != nullptr) {
    each([&](Vec<Sum>& v, int i, int) __attribute__((always_inline)) { v *= splat(c.factors[i]); });
  }
  each([&](Vec<Sum>& v, int i, int column)
           __attribute__((always_inline)) { store(c.to + i * c.to_stride + column, v); });
}

// c[m][n] = sum_k a(m, k) b[k][n] for `rows` <= kTileRows and one panel of columns, where a(m, k) =
// a[m * row_stride + k * step_stride]. Sums run over k in ascending order, so an element doesn't
// depend on how the rows are cut into tiles; what `from` holds is added to the whole sum.
template <class Math>
__attribute__((noinline)) void multiply_panel(int rows, int64_t steps, const typename Math::Unit* a,
                                              int64_t row_stride, int64_t step_stride,
                                              const typename Math::Unit* b, int64_t b_stride,
                                              const Target<typename Math::Sum>& c) {
  const auto run = [&](auto count) __attribute__((always_inline)) {
    multiply_tile<Math, decltype(count)::value>(steps, a, row_stride, step_stride, b, b_stride, c);
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
template <class Math>
void multiply(int64_t rows, int64_t steps, int64_t panels, const typename Math::Unit* a,
              int64_t row_stride, int64_t step_stride, const typename Math::Unit* b,
              int64_t b_stride, int64_t b_panel_stride, const Target<typename Math::Sum>& c) {
  for (int64_t p = 0; p < panels; ++p) {
    for (int64_t m = 0; m < rows; m += kTileRows)
      multiply_panel<Math>(static_cast<int>(min<int64_t>(rows - m, kTileRows)), steps,
                           a + m * row_stride, row_stride, step_stride, b + p * b_panel_stride,
                           b_stride, c.at(m, p * kPanel<typename Math::Unit>));
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
  for (int64_t part = 0, step = 0; part < parts; ++part, step += most)
    multiply<Math>(rows, min(most, steps - step), panels, a + step, row_stride, 1, b + step * width,
                   width, steps * width, sum_in(c, c_stride, part == 0));
}

}  // namespace fastattn::FASTATTN_ISA
