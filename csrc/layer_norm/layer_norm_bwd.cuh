// The gradients of LayerNorm of a residual sum s. With xhat = (s - mean) rstd, g = grad_out weight:
//
//   ds = rstd (g - mean(g) - xhat mean(g xhat)) + grad_sum;  dresidual = ds;  dx = dropout(ds)
//   dweight = sum over rows of grad_out xhat;  dbias = sum over rows of grad_out
//
// Teams and rows are the forward's. A block walks over its rows and holds the sums for dweight and
// dbias of its columns in registers; they go to `partial`, one line a block, and a second kernel
// adds up the lines. Every order is fixed by the grid, which depends on sizes alone: no atomics,
// the same bits each time. Read: s, grad_out, grad_sum where there is one; written: dx, dresidual:
// (3 to 5) N elements a row, and 8 N bytes a block. Rows of more than 4096 columns are read twice,
// and a third time for dweight and dbias by layer_norm_column_sums.
#pragma once

#include "common/rows.cuh"
#include "layer_norm/layer_norm_params.cuh"

namespace fa {

// The thread's pieces of xhat and grad_out; zeros beyond the row.
template <int kStride, int kPieces, int kColumns, class X, class R>
FA_DEVICE void load_normal_and_gradient(float (&xhat)[kPieces][kColumns],
                                        float (&grad)[kPieces][kColumns],
                                        const LayerNormBackwardParams<X, R>& p, int64_t row,
                                        int first) {
  load_pieces<kStride>(xhat, p.sum + row * p.sum_row, first, p.columns, p.columns);
  if (p.grad_out) {
    load_pieces<kStride>(grad, p.grad_out + row * p.grad_out_row, first, p.columns, p.columns);
  } else {
    FA_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      FA_UNROLL
      for (int j = 0; j < kColumns; ++j) grad[i][j] = 0.0f;
    }
  }
  const float mean = p.mean[row], rstd = p.rstd[row];
  FA_UNROLL
  for (int i = 0; i < kPieces; ++i) {
    FA_UNROLL
    for (int j = 0; j < kColumns; ++j)
      xhat[i][j] = first + i * kStride + j < p.columns ? (xhat[i][j] - mean) * rstd : 0.0f;
  }
}

// Adds up the warps' sums, of which each has all kWarps * 32 threads' worth of the same columns,
// and stores those of columns before p.columns at out.
template <int kWarps, int kStride, int kPieces, int kColumns>
FA_DEVICE void store_sums_of_warps(float* out, float* scratch,
                                   const float (&sums)[kPieces][kColumns], int columns) {
  constexpr int kWidth = kPieces * kStride;
  const int warp = threadIdx.x / 32, first = threadIdx.x % 32 * kColumns;
  __syncthreads();
  FA_UNROLL
  for (int i = 0; i < kPieces; ++i) {
    FA_UNROLL
    for (int j = 0; j < kColumns; j += 4)
      store_shared(scratch + warp * kWidth + first + i * kStride + j,
                   make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]));
  }
  __syncthreads();
  for (int column = threadIdx.x; column < min(kWidth, columns); column += kWarps * 32) {
    float sum = 0.0f;
    FA_UNROLL
    for (int i = 0; i < kWarps; ++i) sum += load_shared<float>(scratch + i * kWidth + column);
    out[column] = sum;
  }
}

template <class X, class R, int kSize, bool kWalks>
__global__ void __launch_bounds__(Team<kSize>::kThreads, 2)
    layer_norm_backward(FA_GRID_CONSTANT const LayerNormBackwardParams<X, R> p) {
  using Own = Pieces<X, kSize, kWalks>;
  constexpr int kPieces = Own::kPieces, kColumns = Own::kColumns, kStride = Own::kStride;
  SharedMemory shared;
  const Team<kSize> team(shared);
  const int lane_first = team.lane * kColumns, end = Own::end(p.columns);
  const float share = 1.0f / static_cast<float>(p.columns);
  float weight_sums[kPieces][kColumns] = {}, bias_sums[kPieces][kColumns] = {};
  for (int64_t row = team.first_row(); row < p.rows; row += team.row_step()) {
    float xhat[kPieces][kColumns], grad[kPieces][kColumns];
    float average = 0.0f, projection = 0.0f;
    FA_UNROLL_N(1)
    for (int chunk = 0; chunk < end; chunk += Own::kChunk) {
      const int first = chunk + lane_first;
      load_normal_and_gradient<kStride>(xhat, grad, p, row, first);
      FA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        float weight[kColumns];
        if (p.weight) {
          const int column = first + i * kStride;
          load_any(weight, p.weight, p.weight_type, column, p.columns - column);
        }
        FA_UNROLL
        for (int j = 0; j < kColumns; ++j) {
          if (!kWalks) {
            weight_sums[i][j] += grad[i][j] * xhat[i][j];
            bias_sums[i][j] += grad[i][j];
          }
          if (p.weight) grad[i][j] *= weight[j];
          average += grad[i][j];
          projection += grad[i][j] * xhat[i][j];
        }
      }
    }
    if (!p.grad_x && !p.grad_residual) continue;
    average = team.sum(average) * share;
    projection = team.sum(projection) * share;

    const float rstd = p.rstd[row];
    FA_UNROLL_N(1)
    for (int chunk = 0; chunk < end; chunk += Own::kChunk) {
      const int first = chunk + lane_first;
      if (kWalks) load_normal_and_gradient<kStride>(xhat, grad, p, row, first);
      FA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        const int column = first + i * kStride, left = p.columns - column;
        if (left <= 0) continue;
        float other[kColumns];
        if (kWalks && p.weight) {
          load_any(other, p.weight, p.weight_type, column, left);
          FA_UNROLL
          for (int j = 0; j < kColumns; ++j) grad[i][j] *= other[j];
        }
        FA_UNROLL
        for (int j = 0; j < kColumns; ++j)
          grad[i][j] = rstd * (grad[i][j] - average - xhat[i][j] * projection);
        if (p.grad_sum) {
          load_row(other, p.grad_sum + row * p.grad_sum_row + column, left);
          FA_UNROLL
          for (int j = 0; j < kColumns; ++j) grad[i][j] += other[j];
        }
      }
      const int64_t start = row * p.columns;
      if (p.grad_residual) store_pieces<kStride>(p.grad_residual + start, grad, first, p.columns);
      if (!p.grad_x) continue;
      if (p.dropout.rng_state)
        drop_pieces<kStride>(grad, Dropout(p.dropout), row, first, p.columns);
      store_pieces<kStride>(p.grad_x + start, grad, first, p.columns);
    }
  }
  if constexpr (!kWalks) {
    if (!p.partial) return;
    float* partial = p.partial + static_cast<int64_t>(blockIdx.x) * 2 * p.columns;
    if constexpr (kSize == 32) {
      float* scratch = shared.take<float>(Team<kSize>::kRows * Own::kChunk);
      store_sums_of_warps<Team<kSize>::kRows, kStride>(partial, scratch, weight_sums, p.columns);
      store_sums_of_warps<Team<kSize>::kRows, kStride>(partial + p.columns, scratch, bias_sums,
                                                       p.columns);
    } else {
      store_pieces<kStride>(partial, weight_sums, lane_first, p.columns);
      store_pieces<kStride>(partial + p.columns, bias_sums, lane_first, p.columns);
    }
  }
}

constexpr int kColumnSumsThreads = 256;

// `partial` for rows that no block holds: block (x, y) takes 32 threads' worth of columns of every
// gridDim.y-th group of 8 rows, a warp a row.
template <class X, class R>
__global__ void __launch_bounds__(kColumnSumsThreads)
    layer_norm_column_sums(FA_GRID_CONSTANT const LayerNormBackwardParams<X, R> p) {
  constexpr int kColumns = kVector<X>, kWidth = 32 * kColumns, kWarps = kColumnSumsThreads / 32;
  SharedMemory shared;
  float* scratch = shared.take<float>(kWarps * kWidth);
  const int start = blockIdx.x * kWidth, first = start + threadIdx.x % 32 * kColumns;
  float weight_sums[1][kColumns] = {}, bias_sums[1][kColumns] = {};
  const int64_t step = static_cast<int64_t>(gridDim.y) * kWarps;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * kWarps + threadIdx.x / 32; row < p.rows;
       row += step) {
    float xhat[1][kColumns], grad[1][kColumns];
    load_normal_and_gradient<kWidth>(xhat, grad, p, row, first);
    FA_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      weight_sums[0][j] += grad[0][j] * xhat[0][j];
      bias_sums[0][j] += grad[0][j];
    }
  }
  float* partial = p.partial + static_cast<int64_t>(blockIdx.y) * 2 * p.columns + start;
  const int left = p.columns - start;
  store_sums_of_warps<kWarps, kWidth>(partial, scratch, weight_sums, left);
  store_sums_of_warps<kWarps, kWidth>(partial + p.columns, scratch, bias_sums, left);
}

// The second stage: block (x, 0) adds up 32 columns for the weight, block (x, 1) for the bias; each
// of its warps takes every kThreads / 32-th line.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    layer_norm_parameters(FA_GRID_CONSTANT const LayerNormParametersParams p) {
  constexpr int kWarps = kThreads / 32;
  SharedMemory shared;
  float* scratch = shared.take<float>(kThreads);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.x * 32 + lane;
  void* out = blockIdx.y == 0 ? p.grad_weight : p.grad_bias;
  if (!out) return;
  float sum = 0.0f;
  if (column < p.columns)
    for (int part = warp; part < p.parts; part += kWarps)
      sum += p.partial[(2 * static_cast<int64_t>(part) + blockIdx.y) * p.columns + column];
  store_shared(scratch + threadIdx.x, sum);
  __syncthreads();
  if (warp > 0 || column >= p.columns) return;
  sum = 0.0f;
  FA_UNROLL
  for (int i = 0; i < kWarps; ++i) sum += load_shared<float>(scratch + 32 * i + lane);
  store_any(out, blockIdx.y == 0 ? p.weight_type : p.bias_type, column, sum);
}

}  // namespace fa
