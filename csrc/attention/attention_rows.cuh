// What attention computes row by row beside its products.
//
//   attention_delta:    RowStatistics, with delta = rowsum(dO * O) - dLSE, for the backward
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
  const int first = at.tile * kTile;
  RowStatistics& rows = *RowStatistics::of(p, at, at.head, first);
  for (int r = lane.row_group; r < kTile; r += 16) {
    const int row = first + r;
    const bool there = row < at.q_len;
    float sum = 0;
    for (int c = 4 * lane.column_group; c < p.value_dim; c += 32) {
      const int left = there ? p.value_dim - c : 0;
      const float4 a = load_some(grad_o.at(row, c), grad_o.column_stride, left);
      const float4 b = load_some(o.at(row, c), o.column_stride, left);
      sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
    sum = warp_sum(sum, 8);
    if (lane.column_group != 0) continue;
    if (there && p.grad_lse) sum -= p.grad_lse[statistics + row];
    const float lse = there ? p.lse[statistics + row] : -infinity();
    rows.lse[r] = lse == -infinity() ? infinity() : lse;
    rows.lse_low[r] = there ? p.lse_low[statistics + row] : 0.f;
    rows.delta[r] = sum;
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
  const float scale = kMask ? 1.f : p.scale;
  const Band band = at.from_query(first);
  const float ones[4] = {1, 1, 1, 1};
  float lse[4], lse_low[4], sum[4];
  FA_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int row = first + lane.row(i);
    const bool there = row < at.q_len && p.lse[statistics + row] != -infinity();
    lse[i] = there ? p.lse[statistics + row] : infinity();  // P = exp(s - inf) = 0
    lse_low[i] = there ? p.lse_low[statistics + row] : 0.f;
    sum[i] = 0;
  }

  const T *q_start = columns_start(q, first, lane), *k_start = columns_start(k, 0, lane);
  for (int key = 0; key < at.kv_len; key += kTile, k_start += k.step()) {
    const KeyBits keys(p, at, key);
    Fragment s;
    clear(s);
    if (!keys.none() && !(kBand && band.misses(key))) {
      multiply_columns(s, q, q_start, first, k, k_start, key, shared, lane);
      prepare_scores<kBand, kMask, false>(s, p, at, at.head, band, keys, first, key, lane);
      for_elements([&](int i, int j) {
        s[i][j] = probability(s[i][j], scale, lse[i], lse_low[i]) * p.dropout.scale;
      });
      if (kDropout) drop(s, p, at, first, key, lane);
    }
    if (p.weights.data)
      write_tile(query_rows(p.weights, at, at.head, at.kv_len), s, ones, first, key, lane);
    if (p.grad_weights.data)
      for_elements([&](int i, int j) {
        const int row = first + lane.row(i), column = key + lane.column(j);
        if (row < grad_w.rows && column < grad_w.columns)
          sum[i] += s[i][j] * to_float(*grad_w.at(row, column));
      });
  }

  if (!p.grad_weights.data) return;
  RowStatistics& rows = *RowStatistics::of(p, at, at.head, first);
  FA_UNROLL
  for (int i = 0; i < 4; ++i) {
    sum[i] = warp_sum(sum[i], 8);
    if (lane.column_group == 0) rows.delta[lane.row(i)] += sum[i];
  }
}

}  // namespace fa
