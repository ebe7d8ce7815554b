// The gradient of softmax over a row, from its result:
//
//   dx = scale out (grad_out - sum(grad_out out))
//
// Teams and rows are the forward's. grad_out and out are read once, dx is written once: 3 N
// elements; rows of more than 4096 columns are read twice.
#pragma once

#include "common/rows.cuh"
#include "softmax/softmax_params.cuh"

namespace fa {

template <class T, int kSize, bool kWalks>
__global__ void __launch_bounds__(Team<kSize>::kThreads)
    softmax_backward(FA_GRID_CONSTANT const SoftmaxBackwardParams<T> p) {
  using Own = Pieces<T, kSize, kWalks>;
  constexpr int kPieces = Own::kPieces, kColumns = Own::kColumns, kStride = Own::kStride;
  SharedMemory shared;
  const Team<kSize> team(shared);
  const int lane_first = team.lane * kColumns, end = Own::end(p.columns);
  for (int64_t row = team.first_row(); row < p.rows; row += team.row_step()) {
    float grad[kPieces][kColumns], out[kPieces][kColumns];
    const auto load = [&](int first) {
      load_pieces<kStride>(grad, p.grad_out + row * p.grad_out_row, first, p.columns, p.columns);
      load_pieces<kStride>(out, p.out + row * p.out_row, first, p.columns, p.columns);
    };
    float sum = 0.0f;
    FA_UNROLL_N(1)
    for (int chunk = 0; chunk < end; chunk += Own::kChunk) {
      load(chunk + lane_first);
      FA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        FA_UNROLL
        for (int j = 0; j < kColumns; ++j) sum += grad[i][j] * out[i][j];
      }
    }
    sum = team.sum(sum);
    FA_UNROLL_N(1)
    for (int chunk = 0; chunk < end; chunk += Own::kChunk) {
      const int first = chunk + lane_first;
      if (kWalks) load(first);
      FA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        FA_UNROLL
        for (int j = 0; j < kColumns; ++j) grad[i][j] = p.scale * out[i][j] * (grad[i][j] - sum);
      }
      store_pieces<kStride>(p.grad_x + row * p.columns, grad, first, p.columns);
    }
  }
}

}  // namespace fa
