// The forward's work on a line of scores (maximum, exponentials, dropout) and on a row of results.
#pragma once

#include "attention/masking.h"
#include "common/simd_math.h"

namespace fastattn::FASTATTN_ISA {

template <class Sum>
FASTATTN_INLINE Sum maximum(const Sum* s, int64_t columns) {
  Vec<Sum> high = splat(-kInfinity<Sum>), high1 = high;
  for (int64_t j = 0; j < columns; j += 2 * kLanes<Sum>) {
    high = vmax(load<Sum>(s + j), high);
    high1 = vmax(load<Sum>(s + j + kLanes<Sum>), high1);
  }
  return reduce_max(vmax(high, high1));
}

// p = 2^((s - top) * factor); returns their sum. `columns` is a multiple of two vectors.
template <class Sum, class Weight>
FASTATTN_INLINE Sum exponentials(const Sum* s, int64_t columns, Sum top, Sum factor, Weight* p) {
  Vec<Sum> sum{}, sum1{};
  for (int64_t j = 0; j < columns; j += 2 * kLanes<Sum>) {
    const Vec<Sum> e = exp2((load<Sum>(s + j) - top) * factor);
    const Vec<Sum> e1 = exp2((load<Sum>(s + j + kLanes<Sum>) - top) * factor);
    sum += e;
    sum1 += e1;
    store(p + j, e);
    store(p + j + kLanes<Sum>, e1);
  }
  return reduce_sum(sum + sum1);
}

// The same with zeros where dropout drops; the sum counts them all.
template <class Sum, class Weight>
FASTATTN_INLINE Sum exponentials(const Sum* s, int64_t columns, Sum top, Sum factor, Weight* p,
                                 const DropoutRow& dropout, int64_t key) {
  Vec<Sum> sum{};
  for_each_keep<Sum>(dropout, key, columns, [&](int64_t j, auto keep) {
    const Vec<Sum> e = exp2((load<Sum>(s + j) - top) * factor);
    sum += e;
    store(p + j, keep ? e : Vec<Sum>{});
  });
  return reduce_sum(sum);
}

// The factor that turns a row's sum of exp * value, or an exponential, into the result.
template <class Sum>
FASTATTN_INLINE Sum final_factor(const Dropout& dropout, Sum total) {
  return total == 0 ? 0 : keep_scale<Sum>(dropout) / total;
}

// Row i of the output: from[0, columns) times the factor, zeros where the row saw nothing.
template <class Sum, class S>
FASTATTN_INLINE void store_output_row(const Matrix& out, int64_t i, int64_t columns,
                                      const Sum* from, Sum total, Sum factor, S) {
  S* to = out.at<S>(i);
  const auto result = [&](int64_t d) __attribute__((always_inline)) {
    return total == 0 ? Vec<Sum>{} : load<Sum>(from + d) * factor;
  };
  int64_t d = 0;
  for (; d + kLanes<Sum> <= columns; d += kLanes<Sum>) store(to + d, result(d));
  if (d < columns) store_partial(to + d, result(d), columns - d);
}

// Log-sum-exp, in two parts, of query q of head h; `high` is the maximum of z.
template <class Sum>
inline void store_log_sum_exp(const AttentionForward& call, int64_t b, int64_t h, int64_t q,
                              Sum high, Sum total) {
  if (!call.lse) return;
  const int64_t at = b * call.lse.stride[0] + h * call.lse.stride[1] + q * call.lse.stride[2];
  const Sum log_total = std::log(total), lse = total == 0 ? -kInfinity<Sum> : high + log_total;
  call.lse.as<Sum>()[at] = lse;
  call.lse_low.as<Sum>()[at] = total == 0 ? 0 : (high - lse) + log_total;
}

}  // namespace fastattn::FASTATTN_ISA
