// Losses from logits, and logits into their gradients, one lane a token.
#pragma once

#include <cmath>

#include "common/simd_math.h"
#include "cross_entropy/chunk.h"

namespace fastattn::FASTATTN_ISA {

// Lower than every other finite logit, and finite itself: no difference of two is NaN.
template <class C>
constexpr C kLowest = static_cast<C>(sizeof(C) == 4 ? -0x1.fffffep127 : -0x1.fffffffffffffp1023);

template <class Math>
void clear_moments(const Chunk<Math>& chunk, int64_t group) {
  using C = typename Math::Sum;
  for (int64_t panel = 0; panel < chunk.panels; ++panel)
    for (int which = 0; which < kMoments; ++which) {
      const Vec<C> start = splat(which == kMax ? kLowest<C> : C{0});
      Lanes<C>{{start, start}}.to(chunk.moment(group, which, panel));
    }
}

// Adds the bias to logits z [n][lane] of classes from c on, and folds them into the moments.
template <class Math>
void fold(const Chunk<Math>& chunk, int64_t group, int64_t panel, int64_t c, int64_t n,
          typename Math::Sum* z) {
  using C = typename Math::Sum;
  constexpr int64_t width = Chunk<Math>::kWidth;
  constexpr C log2e = static_cast<C>(kLog2E);
  const auto before = Lanes<C>::at(chunk.moment(group, kMax, panel));
  auto top = before;
  for (int64_t i = 0; i < n; ++i) {
    auto z_i = Lanes<C>::at(z + i * width);
    if (chunk.p.bias) {
      for (auto& half : z_i.half) half += chunk.p.bias.template as<const C>()[c + i];
      z_i.to(z + i * width);
    }
    for (int h = 0; h < 2; ++h) top.half[h] = vmax(z_i.half[h], top.half[h]);
  }
  top.to(chunk.moment(group, kMax, panel));

  auto sum = Lanes<C>::at(chunk.moment(group, kSum, panel));
  auto weighted = Lanes<C>::at(chunk.moment(group, kWeighted, panel));
  auto weight = Lanes<C>::at(chunk.moment(group, kWeight, panel));
  for (int h = 0; h < 2; ++h) {
    const Vec<C> rise = before.half[h] > kLowest<C> ? before.half[h] - top.half[h] : Vec<C>{};
    sum.half[h] *= exp2(rise * log2e);
    weighted.half[h] += weight.half[h] * rise;
  }
  for (int64_t i = 0; i < n; ++i) {
    const auto z_i = Lanes<C>::at(z + i * width);
    const C w = chunk.class_weight(c + i);
    for (int h = 0; h < 2; ++h) {
      const Vec<C> below = z_i.half[h] - top.half[h];
      sum.half[h] += exp2(below * log2e);
      weighted.half[h] += below * w;
      weight.half[h] += w;
    }
  }
  sum.to(chunk.moment(group, kSum, panel));
  weighted.to(chunk.moment(group, kWeighted, panel));
  weight.to(chunk.moment(group, kWeight, panel));
  chunk.for_each_target(panel, c, n, [&](int64_t lane, int64_t i) {
    chunk.moment(group, kTarget, panel)[lane] = z[i * width + lane];
  });
}

// The losses of a panel's tokens, and the coefficients of their gradients.
template <class Math>
void finish_losses(const Chunk<Math>& chunk, int64_t panel) {
  using C = typename Math::Sum;
  constexpr int64_t width = Chunk<Math>::kWidth;
  const CrossEntropyRun& p = chunk.p;
  const C total = static_cast<C>(p.weight_sum);
  const C a = static_cast<C>(p.a), b = static_cast<C>(p.b);
  for (int64_t lane = 0; lane < width; ++lane) {
    const bool exists = lane < chunk.lanes(panel);
    C top = kLowest<C>, sum = 0, weighted = 0;
    for (int64_t g = 0; g < chunk.groups; ++g) top = max(top, chunk.moment(g, kMax, panel)[lane]);
    for (int64_t g = 0; g < chunk.groups; ++g) {
      const C highest = chunk.moment(g, kMax, panel)[lane];
      const C rise = highest > kLowest<C> ? highest - top : 0;
      sum += chunk.moment(g, kSum, panel)[lane] * std::exp(rise);
      weighted +=
          chunk.moment(g, kWeighted, panel)[lane] + chunk.moment(g, kWeight, panel)[lane] * rise;
    }
    const int64_t t = exists ? chunk.target(panel, lane) : 0;
    const C w_t = chunk.class_weight(t);
    C factor = 0;
    if (exists) {
      const int64_t i = chunk.token(panel, lane);
      const C z_t = chunk.moment(t / chunk.group_classes, kTarget, panel)[lane];
      const C log_sum = std::log(sum), nll = w_t * ((top - z_t) + log_sum);
      p.lse.as<C>()[i] = top + log_sum;
      p.nll.as<C>()[i] = nll;
      p.loss.as<C>()[i] = a * nll + (b != 0 ? b * (total * log_sum - weighted) : 0);
      if (p.factor) factor = p.factor.as<const C>()[chunk.first + panel * width + lane];
    }
    chunk.coefficient(kShift, panel)[lane] = top;
    chunk.coefficient(kSlope, panel)[lane] = exists ? factor * (a * w_t + b * total) / sum : 0;
    chunk.coefficient(kOffset, panel)[lane] = factor * b;
    chunk.coefficient(kPeak, panel)[lane] = factor * a * w_t;
  }
}

// Logits of classes [c, c + n) become their gradients.
template <class Math>
void differentiate(const Chunk<Math>& chunk, int64_t panel, int64_t c, int64_t n) {
  using C = typename Math::Sum;
  constexpr int64_t width = Chunk<Math>::kWidth;
  const auto shift = Lanes<C>::at(chunk.coefficient(kShift, panel));
  const auto slope = Lanes<C>::at(chunk.coefficient(kSlope, panel));
  const auto offset = Lanes<C>::at(chunk.coefficient(kOffset, panel));
  const C* peak = chunk.coefficient(kPeak, panel);
  C* z = chunk.logits(panel, c);
  for (int64_t i = 0; i < n; ++i) {
    auto z_i = Lanes<C>::at(z + i * width);
    for (int h = 0; h < 2; ++h) {
      const Vec<C> e = exp2((z_i.half[h] - shift.half[h]) * static_cast<C>(kLog2E));
      z_i.half[h] = e * slope.half[h] - offset.half[h] * chunk.class_weight(c + i);
    }
    z_i.to(z + i * width);
  }
  chunk.for_each_target(panel, c, n,
                        [&](int64_t lane, int64_t i) { z[i * width + lane] -= peak[lane]; });
}

// dbias += the sum over the chunk's tokens of dz, for classes [c, c + n).
template <class Math>
void add_bias_gradient(const Chunk<Math>& chunk, int64_t c, int64_t n) {
  using C = typename Math::Sum;
  for (int64_t i = 0; i < n; ++i) {
    Vec<C> sum{};
    for (int64_t panel = 0; panel < chunk.panels; ++panel)
      for (const Vec<C>& half : Lanes<C>::at(chunk.logits(panel, c + i)).half) sum += half;
    C& grad = chunk.p.grad_bias.template as<C>()[c + i];
    grad = (chunk.first > 0 ? grad : 0) + reduce_sum(sum);
  }
}

}  // namespace fastattn::FASTATTN_ISA
