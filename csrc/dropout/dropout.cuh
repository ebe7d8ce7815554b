// Dropout, which is its own backward.
//
//   out_rc = x_rc / (1 - p) if the word of row r and column c keeps it, else 0
//
// A thread takes 4 columns, the words of one counter; a block walks over the groups of 4 of all
// rows with the grid's stride. Each element is read and written once: 2 sizeof(T) bytes, and a
// quarter of a Philox call.
#pragma once

#include "common/philox.cuh"
#include "common/vector.cuh"
#include "dropout/dropout_params.cuh"

namespace fa {

constexpr int kDropoutThreads = 256;

template <class T>
__global__ void __launch_bounds__(kDropoutThreads)
    dropout_forward(FA_GRID_CONSTANT const DropoutParamsOf<T> p) {
  const Dropout dropout(p.dropout);
  const int64_t groups = (p.columns + 3) / 4, all = p.rows * groups;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kDropoutThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kDropoutThreads + threadIdx.x; i < all;
       i += stride) {
    const int64_t row = i / groups, group = i % groups, left = p.columns - 4 * group;
    float x[4];
    load_row(x, p.x + row * p.columns + 4 * group, left);
    const uint4 words = dropout.words(static_cast<uint32_t>(group), static_cast<uint32_t>(row),
                                      static_cast<uint32_t>(row >> 32));
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    FA_UNROLL
    for (int j = 0; j < 4; ++j) x[j] = dropout.keeps(word[j]) ? x[j] * dropout.scale : 0.0f;
    store_row(p.out + row * p.columns + 4 * group, x, left);
  }
}

}  // namespace fa
