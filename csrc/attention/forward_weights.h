// The attention weights, for callers who ask for them: scores once more, a block of keys at a time,
// now that the rows' maxima and totals are known, and zeros beside them. 2 * D multiply-adds per
// query and key on top of the forward's 4 * D, and the bandwidth of writing Lq * Lk numbers.
#pragma once

#include "attention/forward.h"

namespace fastattn::FASTATTN_ISA {

template <class Math>
void ForwardTask<Math>::write_weights(const HiddenKeys& hidden, Span seen) {
  const int64_t k_len = sequence_.k_len;
  visit_storage<Sum>(call_.weights.dtype, [&](auto type) {
    using S = decltype(type);
    for (int64_t g = 0; g < chunk_.heads; ++g) {
      const int64_t head = chunk_.batch * problem_.heads + chunk_.head + g;
      S* to = call_.weights.as<S>() + (head * sequence_.q_len + chunk_.first) * k_len;
      __builtin_memset(to, 0, static_cast<size_t>(chunk_.rows * k_len) * sizeof(S));
    }
    for (int64_t key = seen.begin; key < seen.end; key += n_.block) {
      const Span block{key, min(key + n_.block, seen.end)};
      pack_keys(block, hidden);
      for (int64_t g = 0; g < chunk_.heads; ++g) {
        const ScoreMask<Sum> scores = mask(chunk_.head + g, hidden);
        for_each_tile(
            [&](int64_t r, int rows) { write_weights_block(scores, block, g, r, rows, S{}); });
      }
    }
  });
}

template <class Math>
template <class S>
void ForwardTask<Math>::write_weights_block(const ScoreMask<Sum>& mask, Span block, int64_t g,
                                            int64_t r, int rows, S) {
  const int64_t i = chunk_.first + r;
  const int64_t head = chunk_.batch * problem_.heads + chunk_.head + g;
  const Window w(mask, block, i, rows);
  if (w.seen.empty()) return;
  multiply_scores(w, g, r, rows);
  const Sum factor = mask.remaining_scale() * static_cast<Sum>(kLog2E);
  for (int n = 0; n < rows; ++n) {
    const int64_t row = g * chunk_.rows + r + n;
    Sum* s = scratch_.scores + n * n_.score_stride;
    mask.apply(s, w.columns(), i + n, w.key);
    const Sum high = scratch_.max[row], top = high == -kInfinity<Sum> ? 0 : high;
    if (call_.rules.dropout.p > 0) {
      exponentials(s, w.columns(), top, factor, s, dropout(g, i + n), w.key);
    } else {
      exponentials(s, w.columns(), top, factor, s);
    }
    const Sum last = last_factor(row);
    S* to = call_.weights.as<S>() + (head * sequence_.q_len + i + n) * sequence_.k_len + w.key;
    const int64_t count = w.seen.end - w.key;
    int64_t j = 0;
    for (; j + kLanes<Sum> <= count; j += kLanes<Sum>) store(to + j, load<Sum>(s + j) * last);
    if (j < count) store_partial(to + j, load<Sum>(s + j) * last, count - j);
  }
}

}  // namespace fastattn::FASTATTN_ISA
