// Attention forward:  output = dropout(softmax(scale * Q K^T + mask)) V,  lse = log sum exp(scores)
//
// One block of 128 threads per 64 queries of a head and kColumns columns of the output; it walks
// over the keys 64 at a time (online softmax: Milakov and Gimelshein 2018; Dao et al. 2022) and
// skips tiles that causal, window or padding hide as a whole. Products: attention_product.cuh.
//
// A tile of 64 x 64 costs 64 * 64 * (Dk + kColumns) multiply-adds and reads 64 rows of Q, K and V;
// Q is read again for every tile (from L2), which leaves the block 16 KB of shared memory. To
// memory go Q, K, V, output and lse once, K and V again per 64 queries as far as L2 loses them. Dk
// may be anything (32 columns at a time); value columns beyond kColumns are other blocks', which
// compute the scores again.
#pragma once

#include "attention/attention_scores.cuh"
#include "common/reduce.cuh"

namespace fa {

// The online softmax of 4 rows of 64 queries.
template <int kColumns>
struct RunningSoftmax {
  Fragment output[kColumns / kTile];  // sum of exp(score - max) * V so far
  float max[4], total[4];             // `total` of this thread's columns alone
  // A maximum to start with: finite, so that hidden scores, -inf, stay below it.
  static constexpr float kLowest = -3.40282347e38f;

  FA_DEVICE RunningSoftmax() {
    FA_UNROLL
    for (int n = 0; n < kColumns / kTile; ++n) clear(output[n]);
    FA_UNROLL
    for (int i = 0; i < 4; ++i) max[i] = kLowest, total[i] = 0;
  }

  // Products s become exp(scale * s - max), with all sums brought to the new maximum.
  FA_DEVICE void add(Fragment& s, float scale) {
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      float highest = s[i][0];
      FA_UNROLL
      for (int j = 1; j < 8; ++j) highest = fmaxf(highest, s[i][j]);
      highest = warp_max(highest, 8);
      const float next = fmaxf(max[i], highest * scale);
      const float shrink = fast_exp2((max[i] - next) * kLog2E);
      max[i] = next;
      total[i] *= shrink;
      FA_UNROLL
      for (int j = 0; j < 8; ++j) {
        s[i][j] = fast_exp2(fmaf(s[i][j], scale, -next) * kLog2E);
        total[i] += s[i][j];
        FA_UNROLL
        for (int n = 0; n < kColumns / kTile; ++n) output[n][i][j] *= shrink;
      }
    }
  }

  FA_DEVICE void finish() {
    FA_UNROLL
    for (int i = 0; i < 4; ++i) total[i] = warp_sum(total[i], 8);
  }
};

// Blocks an SM for which the compiler is to leave registers: a cap at 128, 144 or none. Shared
// memory allows 2 at kColumns = 64. With kBand a cap at 128 makes operands of FFMA clash in
// register banks.
constexpr int forward_blocks(int columns, bool band, bool mask, bool dropout) {
  return columns > 64 || mask || dropout ? 2 : band ? 3 : 4;
}

template <class T, int kColumns, bool kBand, bool kMask, bool kDropout>
__global__ void __launch_bounds__(kAttentionThreads,
                                  forward_blocks(kColumns, kBand, kMask, kDropout))
    attention_forward(FA_GRID_CONSTANT const AttentionParams<T> p) {
  constexpr bool kKeepsQuery = kColumns <= 64;
  char* shared = SharedMemory().take<char>((kKeepsQuery ? 4 : 2) * kPieceBytes);
  const Lane lane;
  const Place at(p, blockIdx.x, false, kBand);
  const int first = at.tile * kTile, column = kColumns < 256 ? 0 : blockIdx.y * kColumns;
  if (first >= at.q_len) return;
  const Rows<const T> q = query_rows(p.query, at, at.head, p.key_dim);
  const Rows<const T> k = key_rows(p.key, at, p.key_dim);
  const Rows<const T> v = key_rows(p.value, at, p.value_dim);
  const T* q_start = columns_start(q, first, lane);
  RunningSoftmax<kColumns> rows;
  if (kKeepsQuery) {
    FA_UNROLL_N(1)
    for (int c = 0; c < p.key_dim; c += kPiece) {
      ColumnPiece<T> piece;
      piece.load(q, q_start, first, c, q.whole_columns(first), lane);
      piece.store(shared + (2 + c / kPiece) * kPieceBytes, lane);
    }
  }

  const Band band = at.from_query(first);
  const int begin = Range::of<kBand>(band, at.kv_len).begin;
  const T *k_start = columns_start(k, begin, lane), *v_start = rows_start(v, begin, column, lane);
  for (int key = begin; key < Range::of<kBand>({0, not_before(band.high)}, at.kv_len).end;
       key += kTile, k_start += k.step(), v_start += v.step()) {
    const KeyBits keys(p, at, key);
    if (keys.none()) continue;
    Fragment s;
    clear(s);
    if (kKeepsQuery) {
      multiply_columns(s, 2 * kPieceBytes, k, k_start, key, shared, lane);
    } else {
      multiply_columns(s, q, q_start, first, k, k_start, key, shared, lane);
    }
    prepare_scores<kBand, kMask, false>(s, p, at, at.head, band, keys, first, key, lane);
    rows.add(s, kMask ? 1.f : p.scale);
    if (kDropout) drop(s, p, at, first, key, lane);
    multiply_rows<kColumns>(rows.output, s, v, v_start, column, keys.word, shared, lane);
  }

  rows.finish();
  const Place to(p, block_index_again(), false, kBand);
  float factor[4];
  FA_UNROLL
  for (int i = 0; i < 4; ++i) {
    const bool dead = rows.total[i] == 0;
    factor[i] = dead ? 0.f : p.dropout.scale / rows.total[i];
    const int row = to.tile * kTile + lane.row(i);
    if (lane.column_group != 0 || column != 0 || row >= to.q_len) continue;
    const float log_total = logf(rows.total[i]), lse = rows.max[i] + log_total;
    const int64_t at_row = to.statistics(p, to.head) + row;
    p.lse[at_row] = dead ? -infinity() : lse;
    p.lse_low[at_row] = dead ? 0.f : (rows.max[i] - lse) + log_total;
  }
  const Rows<T> o = query_rows(p.output, to, to.head, p.value_dim);
  FA_UNROLL
  for (int n = 0; n < kColumns / kTile; ++n)
    write_tile(o, rows.output[n], factor, to.tile * kTile, column + kTile * n, lane);
}

}  // namespace fa
