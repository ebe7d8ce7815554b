// Copies of q, k and v in the order in which the microkernel reads them, converted to the type it
// computes in. Packing costs a fraction of a cycle per element, against two multiplications per
// query and element, and leaves one layout for every dtype, stride and head dimension.
#pragma once

#include "attention/microkernel.h"
#include "attention/problem.h"

namespace fastattn::FASTATTN_ISA {

FASTATTN_INLINE int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

// Calls f(S{}) with the storage type behind `dtype`, of those that compute in C.
template <class C, class F>
void visit_storage(DType dtype, const F& f) {
  visit_float(dtype, [&](auto type) {
    if constexpr (std::is_same_v<Compute<decltype(type)>, C>) f(type);
  });
}

template <int kHigh, class V, int... kLane>
FASTATTN_INLINE V interleave_halves_(V a, V b, std::integer_sequence<int, kLane...>) {
  constexpr int n = sizeof...(kLane);
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, (kLane / 2 + kHigh * (n / 2) + kLane % 2 * n)...);
#else
  return V{(kLane % 2 ? b : a)[kLane / 2 + kHigh * (n / 2)]...};
#endif
}

// Lanes of the lower (or upper) halves of a and b in turn.
template <int kHigh, class V>
FASTATTN_INLINE V interleave_halves(V a, V b) {
  return interleave_halves_<kHigh>(a, b,
                                   std::make_integer_sequence<int, sizeof(V) / sizeof(a[0])>{});
}

// Rows of a square block become columns: each round interleaves the first half of the rows with
// the second; after log2(n) rounds every element has arrived.
template <class V, int kRows>
FASTATTN_INLINE void transpose(V (&row)[kRows]) {
  static_assert(sizeof(V) / sizeof(row[0][0]) == kRows);
#pragma GCC unroll 4
  for (int round = 1; round < kRows; round *= 2) {
    V next[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows / 2; ++i) {
      next[2 * i] = interleave_halves<0>(row[i], row[i + kRows / 2]);
      next[2 * i + 1] = interleave_halves<1>(row[i], row[i + kRows / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) row[i] = next[i];
  }
}

// `numbers` numbers, at most a vector of Units, from anywhere in memory; zeros beyond them.
template <class Math, class S>
__attribute__((noinline)) Vec<typename Math::Unit> gather_units(const S* from, int64_t stride,
                                                                int64_t numbers) {
  using Unit = typename Math::Unit;
  S buffer[kLanes<Unit> * Math::kPack] = {};
  for (int64_t d = 0; d < numbers; ++d) buffer[d] = from[d * stride];
  if constexpr (Math::kPack == 1) {
    return load<Unit>(buffer);
  } else {
    return load_raw<Vec<Unit>>(buffer);
  }
}

// Numbers column, column + 1, ... of a row, whose end is at `columns`, as a vector of Units: float
// and double convert, pairs of bfloat16 stay as they are.
template <class Math, class S>
FASTATTN_INLINE Vec<typename Math::Unit> load_units(const S* row, int64_t stride, int64_t column,
                                                    int64_t columns) {
  using Unit = typename Math::Unit;
  constexpr int width = kLanes<Unit> * Math::kPack;
  const int64_t n = min<int64_t>(columns - column, width);
  if (stride != 1 || n < width) return gather_units<Math>(row + column * stride, stride, n);
  if constexpr (Math::kPack == 1) {
    return load<Unit>(row + column);
  } else {
    return load_raw<Vec<Unit>>(row + column);
  }
}

// Steps of the inner dimension that `columns` numbers take.
template <class Math>
FASTATTN_INLINE int64_t steps_of(int64_t columns) {
  return (columns + Math::kPack - 1) / Math::kPack;
}

// Storage types that a Math reads.
template <class Math, class F>
void visit_math_storage(DType dtype, const F& f) {
  if constexpr (Math::kPack == 2) {
    f(bfloat16{});
  } else {
    visit_storage<typename Math::Unit>(dtype, f);
  }
}

// A matrix as the A of a product, or as its B over rows: rows of Units, `stride` Units apart.
template <class Unit>
struct Operand {
  const Unit* data;
  int64_t stride;
};

// Whether the rows of `m` can be read as they are, with no copy.
template <class Math>
bool is_operand(const Matrix& m, int64_t columns) {
  if constexpr (Math::kPack == 2) {
    return m.column_stride == 1 && columns % 2 == 0 && m.row_stride % 2 == 0;
  } else {
    return m.dtype == kDTypeOf<typename Math::Unit> && m.column_stride == 1;
  }
}

// Rows [first, first + rows), without a copy.
template <class Math>
Operand<typename Math::Unit> as_operand(const Matrix& m, int64_t first) {
  using Unit = typename Math::Unit;
  const int64_t stride = m.row_stride / Math::kPack;
  return {static_cast<const Unit*>(m.data) + first * stride, stride};
}

// Copies rows [first, first + rows) to to[rows][stride], with zeros beyond `columns` and for hidden
// rows. `stride` is a multiple of the lanes.
template <class Math>
__attribute__((noinline)) void pack_rows(const Matrix& m, int64_t first, int64_t rows,
                                         int64_t columns, const uint8_t* hidden,
                                         typename Math::Unit* to, int64_t stride) {
  using Unit = typename Math::Unit;
  constexpr int width = kLanes<Unit> * Math::kPack;
  visit_math_storage<Math>(m.dtype, [&](auto type) {
    using S = decltype(type);
    for (int64_t i = 0; i < rows; ++i, to += stride) {
      const S* row = m.at<const S>(first + i);
      const int64_t n = hidden != nullptr && hidden[first + i] != 0 ? 0 : columns;
      int64_t u = 0;
      if (m.column_stride == 1) {
        for (; (u + kLanes<Unit>)*Math::kPack <= n; u += kLanes<Unit>)
          store(to + u, load_units<Math>(row, 1, u * Math::kPack, n));
      }
      for (; u < stride; u += kLanes<Unit>) {
        const int64_t left = min<int64_t>(max<int64_t>(n - u * Math::kPack, 0), width);
        const S* from = row + min(u * Math::kPack, n) * m.column_stride;
        store(to + u, gather_units<Math>(from, m.column_stride, left));
      }
    }
  });
}

// Rows [first, first + rows) as the B of a product over columns: to[panels][steps][kPanel], where
// each row of `m` becomes a column of a panel. Rows that are hidden or beyond the last are zeros.
template <class Math>
__attribute__((noinline)) void pack_panels(const Matrix& m, int64_t first, int64_t rows,
                                           int64_t columns, const uint8_t* hidden,
                                           typename Math::Unit* to) {
  using Unit = typename Math::Unit;
  constexpr int n = kLanes<Unit>;
  const int64_t steps = steps_of<Math>(columns);
  visit_math_storage<Math>(m.dtype, [&](auto type) {
    using S = decltype(type);
    alignas(64) static constexpr S kZeros[n * Math::kPack] = {};
    for (int64_t r = 0; r < round_up(rows, kPanel<Unit>); r += n) {
      const S* from[n];
      int64_t stride[n];
      for (int i = 0; i < n; ++i) {
        const bool none = r + i >= rows || (hidden != nullptr && hidden[first + r + i] != 0);
        from[i] = none ? kZeros : m.at<const S>(first + r + i);
        stride[i] = none ? 0 : 1;
      }
      Unit* panel = to + r / kPanel<Unit> * kPanel<Unit> * steps + r % kPanel<Unit>;
      for (int64_t step = 0; step < steps; step += n) {
        const int64_t column = step * Math::kPack;
        Vec<Unit> block[n];
        if (m.column_stride == 1 && column + n * Math::kPack <= columns) {
#pragma GCC unroll 16
          for (int i = 0; i < n; ++i)
            block[i] = load_units<Math>(from[i] + column * stride[i], 1, 0, n * Math::kPack);
        } else {
          for (int i = 0; i < n; ++i)
            block[i] = gather_units<Math>(from[i] + column * stride[i] * m.column_stride,
                                          stride[i] * m.column_stride,
                                          min<int64_t>(columns - column, n * Math::kPack));
        }
        transpose(block);
        const int64_t count = min<int64_t>(steps - step, n);
        if (count == n) {
#pragma GCC unroll 16
          for (int i = 0; i < n; ++i) store(panel + i * kPanel<Unit>, block[i]);
        } else {
          for (int i = 0; i < count; ++i) store(panel + i * kPanel<Unit>, block[i]);
        }
        panel += n * kPanel<Unit>;
      }
    }
  });
}

// Rows [first, first + rows) as the B of a product over rows: to[steps][stride] with
// steps = rows / kPack, rounded up; a Unit holds the numbers of kPack neighbouring rows.
template <class Math>
__attribute__((noinline)) void pack_row_groups(const Matrix& m, int64_t first, int64_t rows,
                                               int64_t columns, const uint8_t* hidden,
                                               typename Math::Unit* to, int64_t stride) {
  if constexpr (Math::kPack == 1) {
    pack_rows<Math>(m, first, rows, columns, hidden, to, stride);
  } else {
    constexpr int n = kLanes<uint32_t>;
    const auto load_row = [&](int64_t r, int64_t column) {
      if (r >= rows || (hidden != nullptr && hidden[first + r] != 0)) return Vec<uint32_t>{};
      const auto* row = m.at<const bfloat16>(first + r);
      uint16_t buffer[n] = {};
      if (m.column_stride == 1 && column + n <= columns) {
        __builtin_memcpy(buffer, row + column, sizeof buffer);
      } else {
        for (int64_t d = column; d < min<int64_t>(columns, column + n); ++d)
          buffer[d - column] = row[d * m.column_stride].bits;
      }
      return __builtin_convertvector(load_raw<VecN<uint16_t, n>>(buffer), Vec<uint32_t>);
    };
    for (int64_t r = 0; r < rows; r += 2) {
      for (int64_t column = 0; column < stride; column += n)
        store(to + r / 2 * stride + column, load_row(r, column) | (load_row(r + 1, column) << 16));
    }
  }
}

}  // namespace fastattn::FASTATTN_ISA
