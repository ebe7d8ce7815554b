// A line of scores and of dO V^T, of one query and a window of keys, to W and to z' (attention.h):
//
//   P = exp(z - lse);  W = P * keep / (1 - p);  z' = P * ((dO V^T + dW) * keep / (1 - p) - delta)
//
// The exponentials and dropout's random numbers are the cost, a third of a nanosecond each.
#pragma once

#include "attention/masking.h"
#include "common/simd_math.h"

namespace fastattn::FASTATTN_ISA {

template <class Math>
class BackwardScores {
  using Sum = typename Math::Sum;
  using Window = KeyWindow<Sum>;

 public:
  // What a row is known by.
  struct Row {
    int64_t b, h, i;  // sequence, query head, query
    Sum lse, lse_low, delta;
  };

  BackwardScores(const AttentionBackward& call, const Problem& problem)
      : call_(call),
        problem_(problem),
        has_dropout_(call.rules.dropout.p > 0),
        keep_scale_(keep_scale<Sum>(call.rules.dropout)),
        unit_(call.grad_scores ? 1 : static_cast<Sum>(call.rules.scale)) {}

  // What the lines of z' are multiples of: `scale`, which dQ and dK need anyhow, unless z' itself
  // is wanted too. And what is then left to multiply dQ and dK with.
  Sum remaining_scale() const {
    return call_.grad_scores ? static_cast<Sum>(call_.rules.scale) : 1;
  }

  // s: products q . k, to W; t: dO V^T, to z', which also goes to grad_scores if that is `wanted`.
  __attribute__((noinline)) void differentiate(const ScoreMask<Sum>& mask, const Window& w,
                                               const Row& row, Sum* s, Sum* t, bool wanted) const {
    mask.apply(s, w.columns(), row.i, w.key);
    if (call_.grad_weights) add_grad_weights(w, row, t);
    const Exponent to_p(mask, row);
    const Sum unit = unit_, delta = row.delta * unit;
    if (has_dropout_) {
      const Sum kept_w = keep_scale_, kept_z = keep_scale_ * unit;
      for_each_keep<Sum>(dropout(row), w.key, w.columns(), [&](int64_t j, auto keep) {
        const Vec<Sum> p = to_p(load<Sum>(s + j)), none{};
        store(t + j, p * (load<Sum>(t + j) * (keep ? splat(kept_z) : none) - delta));
        store(s + j, p * (keep ? splat(kept_w) : none));
      });
    } else {
      for (int64_t j = 0; j < w.columns(); j += kLanes<Sum>) {
        const Vec<Sum> p = to_p(load<Sum>(s + j));
        store(t + j, p * (load<Sum>(t + j) * unit - delta));
        store(s + j, p);
      }
    }
    if (call_.grad_scores && wanted) store_grad_scores(w, row, t);
  }

  // sum_j dW_ij W_ij over a window; s: products q . k, overwritten.
  __attribute__((noinline)) Sum weights_dot_grad(const ScoreMask<Sum>& mask, const Window& w,
                                                 const Row& row, Sum* s) const {
    mask.apply(s, w.columns(), row.i, w.key);
    const Exponent to_p(mask, row);
    for (int64_t j = 0; j < w.columns(); j += kLanes<Sum>) store(s + j, to_p(load<Sum>(s + j)));
    if (has_dropout_) {
      for_each_keep<Sum>(dropout(row), w.key, w.columns(), [&](int64_t j, auto keep) {
        store(s + j, keep ? load<Sum>(s + j) * keep_scale_ : Vec<Sum>{});
      });
    }
    Vec<Sum> sum{};
    for_each_grad_weight(w, row, [&](int64_t j, Vec<Sum> grad) { sum += load<Sum>(s + j) * grad; });
    return reduce_sum(sum);
  }

 private:
  // P from the scores of a row. The product with the scale is rounded as in the forward's maximum,
  // so that large scores cancel exactly.
  class Exponent {
   public:
    Exponent(const ScoreMask<Sum>& mask, const Row& row)
        : scale_(mask.remaining_scale()),
          lse_(row.lse == -kInfinity<Sum> ? 0 : row.lse),
          low_(row.lse_low) {}

    FASTATTN_INLINE Vec<Sum> operator()(Vec<Sum> s) const {
      return exp2(((rounded(s * scale_) - lse_) - low_) * static_cast<Sum>(kLog2E));
    }

   private:
    Sum scale_, lse_, low_;
  };

  DropoutRow dropout(const Row& row) const {
    return {call_.rules.dropout, static_cast<uint32_t>(row.i),
            static_cast<uint32_t>(row.b * problem_.heads + row.h)};
  }

  // f(j, lanes of dW) over a window; lanes beyond its last key are 0.
  template <class F>
  void for_each_grad_weight(const Window& w, const Row& row, const F& f) const {
    const TensorView& x = call_.grad_weights;
    visit_storage<Sum>(x.dtype, [&](auto type) {
      using S = decltype(type);
      const S* from = x.as<const S>() + row.b * x.stride[0] + row.h * x.stride[1] +
                      row.i * x.stride[2] + w.key * x.stride[3];
      const int64_t columns = w.seen.end - w.key;
      for (int64_t j = 0; j < columns; j += kLanes<Sum>)
        f(j, load_units<Math>(from, x.stride[3], j, columns));
    });
  }

  __attribute__((noinline)) void add_grad_weights(const Window& w, const Row& row, Sum* t) const {
    for_each_grad_weight(w, row,
                         [&](int64_t j, Vec<Sum> grad) { store(t + j, load<Sum>(t + j) + grad); });
  }

  __attribute__((noinline)) void store_grad_scores(const Window& w, const Row& row,
                                                   const Sum* t) const {
    const Sequence s = problem_.sequence(row.b);
    const int64_t line = (row.b * problem_.heads + row.h) * s.q_len + row.i;
    Sum* to = call_.grad_scores.as<Sum>() + line * s.k_len + w.key;
    const int64_t columns = w.seen.end - w.key;
    for (int64_t j = 0; j < columns; j += kLanes<Sum>)
      store_partial(to + j, load<Sum>(t + j), min<int64_t>(columns - j, kLanes<Sum>));
  }

  const AttentionBackward& call_;
  const Problem& problem_;
  const bool has_dropout_;
  const Sum keep_scale_;
  const Sum unit_;
};

}  // namespace fastattn::FASTATTN_ISA
