// Attention backward, from P recomputed by the saved log-sum-exp:
//   P = exp(scale * Q K^T + mask - lse)     W = P * keep / (1 - p)
//   dV = W^T dO       dP = (dO V^T + dW) * keep / (1 - p)       dS = P * (dP - delta)
//   dQ = scale * dS K         dK = scale * dS^T Q         delta: attention_rows.cuh
//
// Two passes and no atomics, so results are the same bit for bit from run to run: a block of 128
// threads owns 64 queries (dQ) or 64 keys (dK, dV) of a head and walks over the others 64 at a
// time; the heads that share a key head are walked over one after another. S and dP are computed in
// both. kKeyColumns of dK and dQ, kValueColumns of dV are a block's; 0: not computed here. Where
// they are fewer than Dk or Dv, more blocks (grid.y) own the rest and compute S and dP again.
//
// A pair of tiles costs 64 * 64 * (2 * Dk + Dv) multiply-adds for dQ and (2 * Dk + 2 * Dv) for dK
// and dV, and reads 64 rows of each operand once for every product it is in (L2 holds them); 16 KB
// of shared memory.
#pragma once

#include "attention/attention_scores.cuh"

namespace fa {

// Elements of dW, 0 beyond the tensor, added to those of dP.
template <bool kKeyRows, class T>
FA_DEVICE void add_grad_weights(Fragment& dp, const AttentionParams<T>& p, const Place& at,
                                int head, int q_first, int k_first, const Lane& lane) {
  const Rows<const T> dw = query_rows(p.grad_weights, at, head, at.kv_len);
  for_elements([&](int i, int j) {
    const int query = q_first + (kKeyRows ? lane.column(j) : lane.row(i));
    const int key = k_first + (kKeyRows ? lane.row(i) : lane.column(j));
    if (query < dw.rows && key < dw.columns)
      dp[i][j] += to_float(dw.data[query * dw.row_stride + key * dw.column_stride]);
  });
}

template <class T, int kKeyColumns, bool kBand, bool kMask, bool kDropout>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    attention_grad_query(FA_GRID_CONSTANT const AttentionParams<T> p) {
  char* shared = SharedMemory().take<char>(2 * kPieceBytes);
  const Lane lane;
  const Place at(p, blockIdx.x, false, kBand);
  const int first = at.tile * kTile, column = kKeyColumns < 256 ? 0 : blockIdx.y * kKeyColumns;
  if (first >= at.q_len) return;
  const Rows<const T> q = query_rows(p.query, at, at.head, p.key_dim);
  const Rows<const T> k = key_rows(p.key, at, p.key_dim);
  const Rows<const T> v = key_rows(p.value, at, p.value_dim);
  const Rows<const T> grad_o = query_rows(p.grad_output, at, at.head, p.value_dim);
  const int64_t statistics = at.statistics(p, at.head);
  const float scale = score_scale<kMask>(p);
  Fragment sum[kKeyColumns / kTile];
  FA_UNROLL
  for (int n = 0; n < kKeyColumns / kTile; ++n) clear(sum[n]);

  const int begin = kBand ? at.first_key(first) : 0, end = kBand ? at.last_key(first) : at.kv_len;
  for (int n = begin; n < end; n += kTile) {
    const KeyBits keys(p, at, n);
    if (keys.none()) continue;
    Fragment s, dp;
    clear(s);
    multiply_columns(s, q, first, k, n, shared, lane);
    prepare_scores<kBand, kMask, false>(s, p, at, at.head, keys, first, n, lane);
    clear(dp);
    multiply_columns(dp, grad_o, first, v, n, shared, lane);
    if (kMask && p.grad_weights.data) add_grad_weights<false>(dp, p, at, at.head, first, n, lane);
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const RowStatistics row(p, statistics, first + lane.row(i), at.q_len);
      FA_UNROLL
      for (int j = 0; j < 8; j += 4) {
        if (kDropout) {
          const Keep keep(Dropout(p.dropout), first + lane.row(i), n + lane.column(j),
                          at.stream(p, at.head));
          FA_UNROLL
          for (int c = 0; c < 4; ++c)
            dp[i][j + c] = keep.key[c] ? dp[i][j + c] * p.dropout.scale : 0.f;
        }
        FA_UNROLL
        for (int c = j; c < j + 4; ++c)
          s[i][c] = row.probability(s[i][c], scale) * (dp[i][c] - row.delta);
      }
    }
    hide<kBand, false>(s, at, keys, first, n, 0.f, lane);  // dP may be NaN at padded keys
    if (kMask && p.grad_scores.data && column == 0) {
      const float ones[4] = {1, 1, 1, 1};
      write_tile(query_rows(p.grad_scores, at, at.head, at.kv_len), s, ones, first, n, lane);
    }
    multiply_rows<kKeyColumns>(sum, s, k, n, column, keys.word, shared, lane);
  }

  const Rows<T> grad_q = query_rows(p.grad_query, at, at.head, p.key_dim);
  const float factor[4] = {p.grad_scale, p.grad_scale, p.grad_scale, p.grad_scale};
  FA_UNROLL
  for (int n = 0; n < kKeyColumns / kTile; ++n)
    write_tile(grad_q, sum[n], factor, first, column + kTile * n, lane);
}

// Of a weight whose sign tells it.
FA_DEVICE bool is_dropped(float weight) {
  return __float_as_int(weight) < 0;
}

template <class T, int kKeyColumns, int kValueColumns, bool kBand, bool kMask, bool kDropout>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    attention_grad_key_value(FA_GRID_CONSTANT const AttentionParams<T> p) {
  char* shared = SharedMemory().take<char>(2 * kPieceBytes);
  constexpr int kKeyTiles = kKeyColumns / kTile, kValueTiles = kValueColumns / kTile;
  const Lane lane;
  const Place at(p, blockIdx.x, true, false);
  const int first = at.tile * kTile;
  const int column = kKeyColumns < 256 && kValueColumns < 256 ? 0 : blockIdx.y * 256;
  if (first >= at.kv_len) return;
  const Rows<const T> k = key_rows(p.key, at, p.key_dim);
  const Rows<const T> v = key_rows(p.value, at, p.value_dim);
  const KeyBits keys(p, at, first);
  const float scale = score_scale<kMask>(p);
  Fragment grad_k[kKeyTiles ? kKeyTiles : 1], grad_v[kValueTiles ? kValueTiles : 1];
  FA_UNROLL
  for (int n = 0; n < kKeyTiles; ++n) clear(grad_k[n]);
  FA_UNROLL
  for (int n = 0; n < kValueTiles; ++n) clear(grad_v[n]);

  const int begin = kBand ? at.first_query(first) : 0;
  const int end = keys.none() ? 0 : kBand ? at.last_query(first) : at.q_len;
  FA_UNROLL_N(1)
  for (int head = at.head; head < at.head + p.group; ++head) {
    const Rows<const T> q = query_rows(p.query, at, head, p.key_dim);
    const Rows<const T> grad_o = query_rows(p.grad_output, at, head, p.value_dim);
    const int64_t statistics = at.statistics(p, head);
    for (int m = begin; m < end; m += kTile) {
      const unsigned queries[2] = {rows_left(at.q_len, m), rows_left(at.q_len, m + 32)};
      Fragment s;
      clear(s);
      multiply_columns(s, k, first, q, m, shared, lane);
      prepare_scores<kBand, kMask, true>(s, p, at, head, keys, m, first, lane);
      FA_UNROLL
      for (int j = 0; j < 8; ++j) {
        const int query = m + lane.column(j);
        const RowStatistics row(p, statistics, query, at.q_len);
        FA_UNROLL
        for (int i = 0; i < 4; ++i) s[i][j] = row.probability(s[i][j], scale);
        if (kDropout) {  // the sign of a weight tells that it is dropped
          const Keep keep(Dropout(p.dropout), query, first + lane.row(0), at.stream(p, head));
          FA_UNROLL
          for (int i = 0; i < 4; ++i)
            if (!keep.key[i]) s[i][j] = -s[i][j];
        }
      }
      if constexpr (kValueColumns > 0) {
        Fragment kept;
        for_elements(
            [&](int i, int j) { kept[i][j] = kDropout && is_dropped(s[i][j]) ? 0.f : s[i][j]; });
        multiply_rows<kValueColumns>(grad_v, kept, grad_o, m, column, queries, shared, lane);
      }
      if constexpr (kKeyColumns > 0) {
        Fragment dp;
        clear(dp);
        multiply_columns(dp, v, first, grad_o, m, shared, lane);
        if (kMask && p.grad_weights.data) add_grad_weights<true>(dp, p, at, head, m, first, lane);
        FA_UNROLL
        for (int j = 0; j < 8; ++j) {
          const RowStatistics row(p, statistics, m + lane.column(j), at.q_len);
          FA_UNROLL
          for (int i = 0; i < 4; ++i) {
            float x = dp[i][j];
            if (kDropout) x = is_dropped(s[i][j]) ? 0.f : x * p.dropout.scale;
            s[i][j] = fabsf(s[i][j]) * (x - row.delta);
          }
        }
        hide<kBand, true>(s, at, keys, m, first, 0.f, lane);  // dP may be NaN at padded keys
        multiply_rows<kKeyColumns>(grad_k, s, q, m, column, queries, shared, lane);
      }
    }
  }

  const float scales[4] = {p.grad_scale, p.grad_scale, p.grad_scale, p.grad_scale};
  const float keeps[4] = {p.dropout.scale, p.dropout.scale, p.dropout.scale, p.dropout.scale};
  FA_UNROLL
  for (int n = 0; n < kKeyTiles; ++n)
    write_tile(key_rows(p.grad_key, at, p.key_dim), grad_k[n], scales, first, column + kTile * n,
               lane);
  FA_UNROLL
  for (int n = 0; n < kValueTiles; ++n)
    write_tile(key_rows(p.grad_value, at, p.value_dim), grad_v[n], keeps, first, column + kTile * n,
               lane);
}

}  // namespace fa
