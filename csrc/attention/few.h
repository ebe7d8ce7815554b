// The two products of the forward for very few queries, as in decoding: keys and values are read
// where they are, once, since packing them would cost more than multiplying. The bandwidth of
// memory is the limit.
#pragma once

#include "attention/pack.h"

namespace fastattn::FASTATTN_ISA {

// Scores of one query, q[D] (zeros up to whole vectors), with keys [first, first + keys): hidden
// ones give 0 and are not read.
template <class Math>
__attribute__((noinline)) void score_few(const typename Math::Sum* q, const Matrix& k,
                                         int64_t columns, int64_t first, int64_t keys,
                                         const uint8_t* hidden, typename Math::Sum* scores) {
  using Sum = typename Math::Sum;
  visit_storage<Sum>(k.dtype, [&](auto type) {
    using S = decltype(type);
    const bool whole = k.column_stride == 1 && columns % kLanes<Sum> == 0;
    for (int64_t j = 0; j < keys; ++j) {
      const S* row = k.at<const S>(first + j);
      Vec<Sum> sum{};
      if (hidden != nullptr && hidden[first + j] != 0) {
      } else if (whole) {
        for (int64_t d = 0; d < columns; d += kLanes<Sum>)
          sum += load<Sum>(q + d) * load<Sum>(row + d);
      } else {
        for (int64_t d = 0; d < columns; d += kLanes<Sum>)
          sum += load<Sum>(q + d) * load_units<Math>(row, k.column_stride, d, columns);
      }
      scores[j] = reduce_sum(sum);
    }
  });
}

template <class Math, class S>
void add_one_by_one(const typename Math::Sum* p, const Matrix& v, int64_t columns, int64_t first,
                    int64_t keys, const uint8_t* hidden, typename Math::Sum* out, S) {
  using Sum = typename Math::Sum;
  for (int64_t j = 0; j < keys; ++j) {
    if (hidden != nullptr && hidden[first + j] != 0) continue;
    const S* row = v.at<const S>(first + j);
    for (int64_t d = 0; d < columns; d += kLanes<Sum>)
      store(out + d,
            load<Sum>(out + d) + load_units<Math>(row, v.column_stride, d, columns) * p[j]);
  }
}

// out[E] += sum_j p[j] * v[first + j], four values at a time; hidden ones are not read.
template <class Math>
__attribute__((noinline)) void add_few(const typename Math::Sum* p, const Matrix& v,
                                       int64_t columns, int64_t first, int64_t keys,
                                       const uint8_t* hidden, typename Math::Sum* out) {
  using Sum = typename Math::Sum;
  visit_storage<Sum>(v.dtype, [&](auto type) {
    using S = decltype(type);
    const bool whole = v.column_stride == 1 && columns % kLanes<Sum> == 0;
    int64_t j = 0;
    for (; whole && j + 4 <= keys; j += 4) {
      if (hidden != nullptr && load_raw<uint32_t>(hidden + first + j) != 0) {
        add_one_by_one<Math>(p + j, v, columns, first + j, 4, hidden, out, S{});
        continue;
      }
      const S* row = v.at<const S>(first + j);
      for (int64_t d = 0; d < columns; d += kLanes<Sum>) {
        const S *a = row + d, *b = a + 2 * v.row_stride;
        const Vec<Sum> two = load<Sum>(a) * p[j] + load<Sum>(a + v.row_stride) * p[j + 1];
        const Vec<Sum> more = load<Sum>(b) * p[j + 2] + load<Sum>(b + v.row_stride) * p[j + 3];
        store(out + d, load<Sum>(out + d) + (two + more));
      }
    }
    add_one_by_one<Math>(p + j, v, columns, first + j, keys - j, hidden, out, S{});
  });
}

}  // namespace fastattn::FASTATTN_ISA
