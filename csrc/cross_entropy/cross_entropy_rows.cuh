// Losses of rows of logits z, which become gradients in place. With class weights w (default 1), V
// classes, target t and log p_c = (z_c - m) - log(sum(exp(z - m))), m = max(z):
//
//   loss = a w_t (-log p_t) + b sum_c w_c (-log p_c);  nll = w_t (-log p_t);  lse = m + log(sum)
//   dz_c = ((a w_t + b sum w) p_c - a w_t [c = t] - b w_c) factor
//
// and 0 for loss, nll and dz of an ignored token. A block takes a token and walks along its classes
// twice: for maximum and sum, rescaled as the maximum grows, and for the gradient and the smoothed
// part. V logits are read twice, the second time from cache as a rule, and V gradients written: 8 V
// to 12 V bytes. Accesses are of 16 bytes wherever a row begins; its first and last few classes are
// read one by one. Up to 2^30 classes.
#pragma once

#include "common/rows.cuh"
#include "cross_entropy/cross_entropy_params.cuh"

namespace fa {

// A token's logits in groups of 4 that are aligned in memory: group i is classes 4 i - lead and on.
class Logits {
 public:
  FA_DEVICE Logits(float* row, int classes)
      : row_(row),
        classes_(classes),
        lead_(static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(float) % 4)) {}

  FA_DEVICE int groups() const { return (classes_ + lead_ + 3) / 4; }
  FA_DEVICE int column(int group) const { return 4 * group - lead_; }
  FA_DEVICE bool has(int column) const { return column >= 0 && column < classes_; }

  // -inf where there is no class. Not load_global, whose memory nobody may write.
  FA_DEVICE void load(float (&z)[4], int group) const {
    const int first = column(group);
    if (is_whole(first)) {
      const float4 all = *reinterpret_cast<const float4*>(row_ + first);
      z[0] = all.x, z[1] = all.y, z[2] = all.z, z[3] = all.w;
    } else {
      FA_UNROLL
      for (int i = 0; i < 4; ++i) z[i] = has(first + i) ? row_[first + i] : -infinity();
    }
  }

  FA_DEVICE void store(const float (&z)[4], int group) const {
    const int first = column(group);
    if (is_whole(first)) {
      store_global(row_ + first, make_float4(z[0], z[1], z[2], z[3]));
    } else {
      FA_UNROLL
      for (int i = 0; i < 4; ++i)
        if (has(first + i)) row_[first + i] = z[i];
    }
  }

 private:
  FA_DEVICE bool is_whole(int first) const { return first >= 0 && first + 4 <= classes_; }

  float* row_;
  int classes_, lead_;
};

// Maximum and sum of exponentials of what a thread has seen.
struct RunningSum {
  float highest = -infinity(), total = 0.0f;

  FA_DEVICE void add(const float (&z)[4]) {
    const float higher = fmaxf(highest, fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3])));
    const float base = higher == -infinity() ? 0.0f : higher;
    total *= expf(highest - base);
    FA_UNROLL
    for (int i = 0; i < 4; ++i) total += expf(z[i] - base);
    highest = higher;
  }
};

// Four class weights; 1 without any. Where there is no class, whatever.
FA_DEVICE void load_class_weights(float (&w)[4], const CrossEntropyParams& p, int column) {
  FA_UNROLL
  for (int i = 0; i < 4; ++i) {
    float one[1] = {1.0f};
    const bool inside = column + i >= 0 && column + i < p.classes;
    if (p.class_weight && inside) load_any(one, p.class_weight, p.weight_type, column + i, 1);
    w[i] = one[0];
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_rows(FA_GRID_CONSTANT const CrossEntropyParams p) {
  SharedMemory shared;
  float* scratch = shared.take<float>(kThreads / 32);
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    float* row = p.logits + token * p.logits_row;
    const Logits logits(row, p.classes);
    const int64_t given = p.target[token * p.target_stride];
    const bool counts = given != p.ignore_index;
    const bool is_class = given >= 0 && given < p.classes;
    const int truth = is_class ? static_cast<int>(given) : 0;
    // Before any thread writes: the sums below are barriers. NaN tells of a target that is no
    // class.
    const float truth_logit = is_class || !counts ? row[truth] : __int_as_float(0x7fffffff);

    RunningSum running;
    for (int group = threadIdx.x; group < logits.groups(); group += kThreads) {
      float z[4];
      logits.load(z, group);
      running.add(z);
    }
    const float highest = block_max<kThreads>(running.highest, scratch);
    const float base = highest == -infinity() ? 0.0f : highest;
    const float total = block_sum<kThreads>(running.total * expf(running.highest - base), scratch);
    const float log_total = logf(total);

    float truth_weight[1] = {1.0f};
    if (p.class_weight) load_any(truth_weight, p.class_weight, p.weight_type, truth, 1);
    const float weight_sum = p.weight_sum ? *p.weight_sum : static_cast<float>(p.classes);
    const float nll = truth_weight[0] * (log_total - (truth_logit - highest));
    const float truth_share = p.a * truth_weight[0];
    const float share = truth_share + (p.b != 0.0f ? p.b * weight_sum : 0.0f);
    const float factor = p.factor ? p.factor[token] : 0.0f;
    float smoothed = 0.0f;
    if (p.factor || p.b != 0.0f) {
      for (int group = threadIdx.x; group < logits.groups(); group += kThreads) {
        const int first = logits.column(group);
        float z[4], w[4];
        logits.load(z, group);
        if (p.b != 0.0f) load_class_weights(w, p, first);
        FA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float log_p = (z[i] - highest) - log_total;
          float gradient = share * expf(log_p);
          if (p.b != 0.0f) {
            if (logits.has(first + i)) smoothed -= w[i] * log_p;
            gradient -= p.b * w[i];
          }
          if (first + i == truth) gradient -= truth_share;
          z[i] = counts ? gradient * factor : 0.0f;
        }
        if (p.factor) logits.store(z, group);
      }
    }
    float loss = p.a * nll;
    if (p.b != 0.0f) loss += p.b * block_sum<kThreads>(smoothed, scratch);
    if (threadIdx.x == 0) {
      p.loss[token] = counts ? loss : 0.0f;
      p.nll[token] = counts ? nll : 0.0f;
      p.lse[token] = highest + log_total;
    }
  }
}

}  // namespace fa
