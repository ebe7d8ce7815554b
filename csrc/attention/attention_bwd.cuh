// Attention backward, from P recomputed by the saved log-sum-exp:
//   P = exp(scale * Q K^T + mask - lse)     W = P * keep / (1 - p)
//   dV = W^T dO       dP = (dO V^T + dW) * keep / (1 - p)       dS = P * (dP - delta)
//   dQ = scale * dS K         dK = scale * dS^T Q         delta: RowStatistics
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
    if (query < dw.rows && key < dw.columns) dp[i][j] += to_float(*dw.at(query, key));
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
  const float scale = kMask ? 1.f : p.scale;
  float lse[4], lse_low[4], delta[4];
  const RowStatistics* const rows = RowStatistics::of(p, at, at.head, first);
  FA_UNROLL
  for (int i = 0; i < 4; ++i) {
    lse[i] = rows->lse[lane.row(i)];
    lse_low[i] = rows->lse_low[lane.row(i)];
    delta[i] = rows->delta[lane.row(i)];
  }
  Fragment sum[kKeyColumns / kTile];
  FA_UNROLL
  for (int n = 0; n < kKeyColumns / kTile; ++n) clear(sum[n]);

  const Band band = at.from_query(first);
  const auto [begin, end] = Range::of<kBand>(band, at.kv_len);
  const T *q_start = columns_start(q, first, lane), *do_start = columns_start(grad_o, first, lane);
  const T *k_start = columns_start(k, begin, lane), *v_start = columns_start(v, begin, lane);
  const T* k_rows = rows_start(k, begin, column, lane);
  for (int key = begin; key < end;
       key += kTile, k_start += k.step(), v_start += v.step(), k_rows += k.step()) {
    const KeyBits keys(p, at, key);
    if (keys.none()) continue;
    Fragment s, dp;
    clear(s);
    multiply_columns(s, q, q_start, first, k, k_start, key, shared, lane);
    prepare_scores<kBand, kMask, false>(s, p, at, at.head, band, keys, first, key, lane);
    clear(dp);
    multiply_columns(dp, grad_o, do_start, first, v, v_start, key, shared, lane);
    if (kMask && p.grad_weights.data) add_grad_weights<false>(dp, p, at, at.head, first, key, lane);
    if (kDropout) {
      FA_UNROLL
      for (int n = 0; n < 8; ++n) {
        const int i = n & 3, j = n & 4;
        const Keep keep(Dropout(p.dropout), first + lane.row(i), key + lane.column(j),
                        at.stream(p, at.head));
        FA_UNROLL
        for (int c = 0; c < 4; ++c)
          dp[i][j + c] = keep.key[c] ? dp[i][j + c] * p.dropout.scale : 0.f;
      }
    }
    for_elements([&](int i, int j) {
      s[i][j] = probability(s[i][j], scale, lse[i], lse_low[i]) * (dp[i][j] - delta[i]);
    });
    hide<kBand, false>(s, band, keys, key, 0.f, lane);  // dP may be NaN at padded keys
    if (kMask && p.grad_scores.data && column == 0) {
      const float ones[4] = {1, 1, 1, 1};
      write_tile(query_rows(p.grad_scores, at, at.head, at.kv_len), s, ones, first, key, lane);
    }
    multiply_rows<kKeyColumns>(sum, s, k, k_rows, column, keys.word, shared, lane);
  }

  if (!p.grad_query.data) return;
  const Place to(p, block_index_again(), false, kBand);
  const Rows<T> grad_q = query_rows(p.grad_query, to, to.head, p.key_dim);
  const float factor[4] = {p.scale, p.scale, p.scale, p.scale};
  FA_UNROLL
  for (int n = 0; n < kKeyColumns / kTile; ++n)
    write_tile(grad_q, sum[n], factor, to.tile * kTile, column + kTile * n, lane);
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
  const float scale = kMask ? 1.f : p.scale;
  Fragment grad_k[kKeyTiles ? kKeyTiles : 1], grad_v[kValueTiles ? kValueTiles : 1];
  FA_UNROLL
  for (int n = 0; n < kKeyTiles; ++n) clear(grad_k[n]);
  FA_UNROLL
  for (int n = 0; n < kValueTiles; ++n) clear(grad_v[n]);

  const Band band = at.from_key(first);
  const auto [begin, last] = Range::of<kBand>(band, at.q_len);
  const int end = keys.none() ? 0 : last;
  const T *k_start = columns_start(k, first, lane), *v_start = columns_start(v, first, lane);
  FA_UNROLL_N(1)
  for (int head = at.head; head < at.head + p.group; ++head) {
    const Rows<const T> q = query_rows(p.query, at, head, p.key_dim);
    const Rows<const T> grad_o = query_rows(p.grad_output, at, head, p.value_dim);
    const RowStatistics* rows = RowStatistics::of(p, at, head, begin);
    const T *q_start = columns_start(q, begin, lane), *q_rows = rows_start(q, begin, column, lane);
    const T* do_start = columns_start(grad_o, begin, lane);
    const T* do_rows = rows_start(grad_o, begin, column, lane);
    for (int m = begin; m < end; m += kTile, q_start += q.step(), q_rows += q.step(),
             do_start += grad_o.step(), do_rows += grad_o.step(), ++rows) {
      const unsigned queries[2] = {rows_left(at.q_len, m), rows_left(at.q_len, m + 32)};
      Fragment s;
      clear(s);
      multiply_columns(s, k, k_start, first, q, q_start, m, shared, lane);
      prepare_scores<kBand, kMask, true>(s, p, at, head, band, keys, m, first, lane);
      {
        float lse[8], lse_low[8];
        load_columns(lse, rows->lse, lane);
        load_columns(lse_low, rows->lse_low, lane);
        for_elements(
            [&](int i, int j) { s[i][j] = probability(s[i][j], scale, lse[j], lse_low[j]); });
      }
      if (kDropout) {  // the sign of a weight tells that it is dropped
        FA_UNROLL
        for (int j = 0; j < 8; ++j) {
          const Keep keep(Dropout(p.dropout), m + lane.column(j), first + lane.row(0),
                          at.stream(p, head));
          FA_UNROLL
          for (int i = 0; i < 4; ++i)
            if (!keep.key[i]) s[i][j] = -s[i][j];
        }
      }
      if constexpr (kValueColumns > 0) {
        Fragment kept;
        for_elements(
            [&](int i, int j) { kept[i][j] = kDropout && is_dropped(s[i][j]) ? 0.f : s[i][j]; });
        multiply_rows<kValueColumns>(grad_v, kept, grad_o, do_rows, column, queries, shared, lane);
      }
      if constexpr (kKeyColumns > 0) {
        Fragment dp;
        clear(dp);
        multiply_columns(dp, v, v_start, first, grad_o, do_start, m, shared, lane);
        if (kMask && p.grad_weights.data) add_grad_weights<true>(dp, p, at, head, m, first, lane);
        float delta[8];
        load_columns(delta, rows->delta, lane);
        for_elements([&](int i, int j) {
          float x = dp[i][j];
          if (kDropout) x = is_dropped(s[i][j]) ? 0.f : x * p.dropout.scale;
          s[i][j] = fabsf(s[i][j]) * (x - delta[j]);
        });
        hide<kBand, true>(s, band, keys, m, 0.f, lane);  // dP may be NaN at padded keys
        multiply_rows<kKeyColumns>(grad_k, s, q, q_rows, column, queries, shared, lane);
      }
    }
  }

  const Place to(p, block_index_again(), true, false);
  const float scales[4] = {p.scale, p.scale, p.scale, p.scale};
  const float keeps[4] = {p.dropout.scale, p.dropout.scale, p.dropout.scale, p.dropout.scale};
  FA_UNROLL
  for (int n = 0; n < kKeyTiles; ++n)
    write_tile(key_rows(p.grad_key, to, p.key_dim), grad_k[n], scales, to.tile * kTile,
               column + kTile * n, lane);
  FA_UNROLL
  for (int n = 0; n < kValueTiles; ++n)
    write_tile(key_rows(p.grad_value, to, p.value_dim), grad_v[n], keeps, to.tile * kTile,
               column + kTile * n, lane);
}

}  // namespace fa
