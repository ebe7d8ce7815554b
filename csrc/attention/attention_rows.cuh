// What attention computes row by row beside its products.
//
//   attention_delta:    delta = rowsum(dO * O) - dLSE, for the backward
//   attention_weights:  W = exp(scale * Q K^T + mask - lse) * keep / (1 - p), written to `weights`;
//                       or, given grad_weights, delta += rowsum(dW * W)
//
// One block of 128 threads per 64 queries of a head. attention_delta reads dO and O once.
// attention_weights walks over all keys 64 at a time: 64 * 64 * Dk multiply-adds a tile, and W or
// dW moved once; 16 KB of shared memory.
#pragma once

#include "attention/attention_scores.cuh"
#include "common/reduce.cuh"

namespace fa {

template <class T>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_delta(FA_GRID_CONSTANT const AttentionParams<T> p) {
  const Lane lane;
  const Place at(p, blockIdx.x, false, false);
  const Rows<const T> grad_o = query_rows(p.grad_output, at, at.head, p.value_dim);
  const Rows<const T> o = read_only(query_rows(p.output, at, at.head, p.value_dim));
  const int64_t statistics = at.statistics(p, at.head);
  const int first = at.tile * kTile, end = min(first + kTile, at.q_len);
  for (int row = first + lane.row_group; row - lane.row_group < end; row += 16) {
    const bool there = row < end;
    float sum = 0;
    for (int c = 4 * lane.column_group; c < p.value_dim; c += 32) {
      const float4 a = load_some(grad_o, there ? row : o.rows, c);
      const float4 b = load_some(o, there ? row : o.rows, c);
      sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
    sum = warp_sum(sum, 8);
    if (there && lane.column_group == 0)
      p.delta[statistics + row] = p.grad_lse ? sum - p.grad_lse[statistics + row] : sum;
  }
}

template <class T, bool kBand, bool kMask, bool kDropout>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    attention_weights(FA_GRID_CONSTANT const AttentionParams<T> p) {
  char* shared = SharedMemory().take<char>(2 * kPieceBytes);
  const Lane lane;
  const Place at(p, blockIdx.x, false, kBand);
  const int first = at.tile * kTile;
  if (first >= at.q_len) return;
  const Rows<const T> q = query_rows(p.query, at, at.head, p.key_dim);
  const Rows<const T> k = key_rows(p.key, at, p.key_dim);
  const Rows<const T> grad_w = query_rows(p.grad_weights, at, at.head, at.kv_len);
  const int64_t statistics = at.statistics(p, at.head);
  const float scale = score_scale<kMask>(p);
  const float ones[4] = {1, 1, 1, 1};
  float sum[4] = {0, 0, 0, 0};

  for (int key = 0; key < at.kv_len; key += kTile) {
    const KeyBits keys(p, at, key);
    Fragment s;
    clear(s);
    if (!keys.none() && !(kBand && at.band.misses(first, key))) {
      multiply_columns(s, q, first, k, key, shared, lane);
      prepare_scores<kBand, kMask, false>(s, p, at, at.head, keys, first, key, lane);
      FA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const RowStatistics row(p, statistics, first + lane.row(i), at.q_len);
        FA_UNROLL
        for (int j = 0; j < 8; ++j) s[i][j] = row.probability(s[i][j], scale) * p.dropout.scale;
      }
      if (kDropout) drop(s, p, at, first, key, lane);
    }
    if (p.weights.data)
      write_tile(query_rows(p.weights, at, at.head, at.kv_len), s, ones, first, key, lane);
    if (p.grad_weights.data)
      for_elements([&](int i, int j) {
        const int row = first + lane.row(i), column = key + lane.column(j);
        if (row < grad_w.rows && column < grad_w.columns)
          sum[i] += s[i][j] *
                    to_float(grad_w.data[row * grad_w.row_stride + column * grad_w.column_stride]);
      });
  }

  if (!p.grad_weights.data) return;
  FA_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int row = first + lane.row(i);
    sum[i] = warp_sum(sum[i], 8);
    if (lane.column_group == 0 && row < at.q_len) p.delta[statistics + row] += sum[i];
  }
}

}  // namespace fa
