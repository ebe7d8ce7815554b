// LayerNorm of a residual sum (Ba et al. 2016; Vaswani et al. 2017, 5.4), for a row of N:
//
//   s = residual + dropout(x);  mean = sum(s) / N;  rstd = 1 / sqrt(sum((s - mean)^2) / N + eps)
//   out = (s - mean) rstd weight + bias
//
// A warp takes a row of up to 1024 columns and a block of 256 threads one of up to 4096; they hold
// it in registers, so that x and residual are read once, out is written once, and so is s where the
// backward wants it: (2 to 4) N elements. A longer row is read three times, and its dropout drawn
// as often. The variance is that of differences from the mean, in fp32 and before s is rounded.
#pragma once

#include "common/rows.cuh"
#include "layer_norm/layer_norm_params.cuh"

namespace fa {

// The thread's pieces of s; zeros beyond the row.
template <int kStride, int kPieces, int kColumns, class X, class R>
FA_DEVICE void load_residual_sum(float (&out)[kPieces][kColumns],
                                 const LayerNormForwardParams<X, R>& p, int64_t row, int first) {
  load_pieces<kStride>(out, p.x + row * p.x_row, first, p.columns, p.columns);
  if (p.dropout.rng_state) drop_pieces<kStride>(out, Dropout(p.dropout), row, first, p.columns);
  if (p.residual) {
    float residual[kPieces][kColumns];
    load_pieces<kStride>(residual, p.residual + row * p.residual_row, first, p.columns, p.columns);
    FA_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      FA_UNROLL
      for (int j = 0; j < kColumns; ++j) out[i][j] += residual[i][j];
    }
  }
}

template <class X, class R, int kSize, bool kWalks>
__global__ void __launch_bounds__(Team<kSize>::kThreads)
    layer_norm_forward(FA_GRID_CONSTANT const LayerNormForwardParams<X, R> p) {
  using Own = Pieces<X, kSize, kWalks>;
  constexpr int kPieces = Own::kPieces, kColumns = Own::kColumns, kStride = Own::kStride;
  SharedMemory shared;
  const Team<kSize> team(shared);
  const int lane_first = team.lane * kColumns, end = Own::end(p.columns);
  const float share = 1.0f / static_cast<float>(p.columns);
  for (int64_t row = team.first_row(); row < p.rows; row += team.row_step()) {
    float s[kPieces][kColumns];
    float sum = 0.0f;
    FA_UNROLL_N(1)
    for (int chunk = 0; chunk < end; chunk += Own::kChunk) {
      const int first = chunk + lane_first;
      load_residual_sum<kStride>(s, p, row, first);
      if (p.sum) store_pieces<kStride>(p.sum + row * p.columns, s, first, p.columns);
      FA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        FA_UNROLL
        for (int j = 0; j < kColumns; ++j) sum += s[i][j];
      }
    }
    const float mean = team.sum(sum) * share;

    float squares = 0.0f;
    FA_UNROLL_N(1)
    for (int chunk = 0; chunk < end; chunk += Own::kChunk) {
      const int first = chunk + lane_first;
      if (kWalks) load_residual_sum<kStride>(s, p, row, first);
      FA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        FA_UNROLL
        for (int j = 0; j < kColumns; ++j) {
          const float centred = s[i][j] - mean;
          if (first + i * kStride + j < p.columns) squares += centred * centred;
        }
      }
    }
    const float rstd = rsqrtf(team.sum(squares) * share + p.eps);

    FA_UNROLL_N(1)
    for (int chunk = 0; chunk < end; chunk += Own::kChunk) {
      const int first = chunk + lane_first;
      if (kWalks) load_residual_sum<kStride>(s, p, row, first);
      FA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        const int column = first + i * kStride, left = p.columns - column;
        if (left <= 0) continue;
        float factor[kColumns], out[kColumns];
        FA_UNROLL
        for (int j = 0; j < kColumns; ++j) out[j] = (s[i][j] - mean) * rstd;
        if (p.weight) {
          load_any(factor, p.weight, p.weight_type, column, left);
          FA_UNROLL
          for (int j = 0; j < kColumns; ++j) out[j] *= factor[j];
        }
        if (p.bias) {
          load_any(factor, p.bias, p.bias_type, column, left);
          FA_UNROLL
          for (int j = 0; j < kColumns; ++j) out[j] += factor[j];
        }
        store_row(p.out + row * p.columns + column, out, left);
      }
    }
    if (team.lane == 0) {
      p.mean[row] = mean;
      p.rstd[row] = rstd;
    }
  }
}

}  // namespace fa
