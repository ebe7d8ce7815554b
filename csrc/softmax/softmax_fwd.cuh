// Softmax over a row:
//
//   s = scale x + mask, -inf where a bool mask or the causal diagonal hides;  m = max(s)
//   out = exp(s - m) / sum(exp(s - m));  a row that sees nothing is 0
//
// A warp takes a row of up to 1024 columns and a block of 256 threads one of up to 4096; they hold
// it in registers, so that x and mask are read once and out is written once: 2 N elements and the
// mask. A longer row is read twice, first for its maximum and, rescaled as that grows, its sum.
// What is hidden is selected away, NaN or not. The causal part of x beyond the diagonal is not
// read.
#pragma once

#include "common/rows.cuh"
#include "softmax/softmax_params.cuh"

namespace fa {

// One row of the mask.
template <class T>
class MaskRow {
 public:
  FA_DEVICE MaskRow(const SoftmaxForwardParams<T>& p, unsigned position, unsigned head)
      : kind_(p.mask_kind), type_(p.mask_type), spreads_(p.mask_spreads) {
    if (kind_ == kNoMask) return;
    const unsigned heads = p.heads;
    start_ = head / heads * p.mask_batch + head % heads * p.mask_head + position * p.mask_row;
    mask_ = p.mask;
  }

  // Scores of columns `column` and on as the mask changes them; columns from `end` on are not read.
  template <int N>
  FA_DEVICE void apply(float (&score)[N], int column, int end) const {
    if (kind_ == kBoolMask) {
      uint8_t keep[N];
      load_bytes(keep, static_cast<const uint8_t*>(mask_) + start_, column, end);
      FA_UNROLL
      for (int i = 0; i < N; ++i) score[i] = keep[i] ? score[i] : -infinity();
    } else if (kind_ == kAddedMask) {
      float added[N];
      load_any(added, mask_, type_, start_ + (spreads_ ? 0 : column), spreads_ ? 1 : end - column);
      FA_UNROLL
      for (int i = 0; i < N; ++i) score[i] += spreads_ ? added[0] : added[i];
    }
  }

 private:
  template <int N>
  FA_DEVICE void load_bytes(uint8_t (&out)[N], const uint8_t* row, int column, int end) const {
    using Access = typename Word<N>::type;
    const uint8_t* p = row + (spreads_ ? 0 : column);
    if (!spreads_ && column + N <= end && is_aligned<N>(p)) {
      const Access word = load_global<Access>(p);
      memcpy(out, &word, N);
    } else {
      FA_UNROLL
      for (int i = 0; i < N; ++i) out[i] = column + i < end ? p[spreads_ ? 0 : i] : 0;
    }
  }

  int kind_, type_, spreads_;
  int64_t start_ = 0;
  const void* mask_ = nullptr;
};

// 0 for a row that sees nothing, where (-inf) - (-inf) must not be formed.
FA_DEVICE float finite_maximum(float highest) {
  return highest == -infinity() ? 0.0f : highest;
}

template <class T, int kSize, bool kWalks>
__global__ void __launch_bounds__(Team<kSize>::kThreads)
    softmax_forward(FA_GRID_CONSTANT const SoftmaxForwardParams<T> p) {
  using Own = Pieces<T, kSize, kWalks>;
  constexpr int kPieces = Own::kPieces, kColumns = Own::kColumns, kStride = Own::kStride;
  SharedMemory shared;
  const Team<kSize> team(shared);
  const int lane_first = team.lane * kColumns, end = Own::end(p.columns);
  for (int64_t row = team.first_row(); row < p.rows; row += team.row_step()) {
    const unsigned length = p.length, position = static_cast<unsigned>(row) % length;
    const MaskRow<T> mask(p, position, static_cast<unsigned>(row) / length);
    const int seen = p.is_causal ? min(p.columns, static_cast<int>(position) + 1) : p.columns;
    const T* x = p.x + row * p.x_row;

    float s[kPieces][kColumns];
    const auto load_scores = [&](int first) {
      load_pieces<kStride>(s, x, first, seen, p.columns);
      FA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        const int column = first + i * kStride;
        FA_UNROLL
        for (int j = 0; j < kColumns; ++j) s[i][j] *= p.scale;
        if (column < seen) mask.apply(s[i], column, seen);
        FA_UNROLL
        for (int j = 0; j < kColumns; ++j)
          if (column + j >= seen) s[i][j] = -infinity();
      }
    };
    const auto highest_score = [&] {
      float highest = -infinity();
      FA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        FA_UNROLL
        for (int j = 0; j < kColumns; ++j) highest = fmaxf(highest, s[i][j]);
      }
      return highest;
    };
    // Scores become exponentials; returns their sum.
    const auto exponentiate = [&](float maximum) {
      float total = 0.0f;
      FA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        FA_UNROLL
        for (int j = 0; j < kColumns; ++j) total += s[i][j] = expf(s[i][j] - maximum);
      }
      return total;
    };

    float maximum, total = 0.0f;
    if (kWalks) {
      float highest = -infinity();
      FA_UNROLL_N(1)
      for (int chunk = 0; chunk < end; chunk += Own::kChunk) {
        load_scores(chunk + lane_first);
        const float higher = fmaxf(highest, highest_score()), base = finite_maximum(higher);
        total = total * expf(highest - base) + exponentiate(base);
        highest = higher;
      }
      maximum = finite_maximum(team.max(highest));
      total *= expf(highest - maximum);
    } else {
      load_scores(lane_first);
      maximum = finite_maximum(team.max(highest_score()));
      total = exponentiate(maximum);
    }
    total = team.sum(total);
    const float inverse = total == 0.0f ? 1.0f : 1.0f / total;
    FA_UNROLL_N(1)
    for (int chunk = 0; chunk < end; chunk += Own::kChunk) {
      const int first = chunk + lane_first;
      if (kWalks) {
        load_scores(first);
        exponentiate(maximum);
      }
      FA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        FA_UNROLL
        for (int j = 0; j < kColumns; ++j) s[i][j] *= inverse;
      }
      store_pieces<kStride>(p.out + row * p.columns, s, first, p.columns);
    }
  }
}

}  // namespace fa
