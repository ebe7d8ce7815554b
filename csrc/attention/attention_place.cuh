// Where a block works, and which keys are there for it to see: sequence and head, the band of
// causal and window, padding.
#pragma once

#include "attention/attention_product.cuh"

namespace fa {

constexpr int kFar = 1 << 30;  // beyond any distance between a query and a key

// Column c is visible to row r if low <= c - r <= high.
struct Band {
  int low, high;
  // Of 64 columns from `column` on and rows 0 to 63: all are outside; some are.
  FA_DEVICE bool misses(int column) const {
    return column + (kTile - 1) < low || column - (kTile - 1) > high;
  }
  FA_DEVICE bool cuts(int column) const {
    return column - (kTile - 1) < low || column + (kTile - 1) > high;
  }
};

// blockIdx.x, read anew: a Place made of it at a kernel's end keeps no registers during the kernel.
FA_DEVICE unsigned block_index_again() {
#ifdef FASTATTN_EMULATOR
  return blockIdx.x;
#else
  unsigned index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
#endif
}

// One sequence and query head, and the tile of it that is the block's. Blocks are numbered heads
// first, so that the heads' longest tiles start together.
struct Place {
  int batch, head, kv_head, tile, q_len, kv_len, q_start, kv_start;
  Band band;  // of keys (columns) and queries

  // by_key_head: one block for all query heads of a key head, of which `head` is the first.
  template <class T>
  FA_DEVICE Place(const AttentionParams<T>& p, unsigned block, bool by_key_head, bool backwards) {
    const unsigned heads = by_key_head ? p.heads / p.group : p.heads, all = heads * p.batch;
    const unsigned rest = block % all;
    tile = static_cast<int>(block / all);
    if (backwards) tile = p.tiles - 1 - tile;
    batch = static_cast<int>(rest / heads);
    head = static_cast<int>(rest % heads) * (by_key_head ? p.group : 1);
    kv_head = head / p.group;
    q_len = p.q_len;
    kv_len = p.kv_len;
    q_start = kv_start = 0;
    if (p.cu_seqlens_q) {
      q_start = p.cu_seqlens_q[batch];
      q_len = p.cu_seqlens_q[batch + 1] - q_start;
      kv_start = p.cu_seqlens_k[batch];
      kv_len = p.cu_seqlens_k[batch + 1] - kv_start;
    }
    const int diagonal = p.bottom_right ? kv_len - q_len : 0;
    band.low = p.window_left < 0 ? -kFar : max(diagonal - p.window_left, -kFar);
    band.high = p.window_right < 0 ? kFar : min(diagonal + p.window_right, kFar);
    if (p.is_causal) band.high = min(band.high, diagonal);
  }

  // With rows counted from `first` on: queries, whose columns are keys, or the other way round.
  FA_DEVICE Band from_query(int first) const { return {first + band.low, first + band.high}; }
  FA_DEVICE Band from_key(int first) const { return {first - band.high, first - band.low}; }

  // The second word of a head's rows in dropout's counters.
  template <class T>
  FA_DEVICE int stream(const AttentionParams<T>& p, int query_head) const {
    return batch * p.heads + query_head;
  }
  // Where the statistics of a head's queries begin.
  template <class T>
  FA_DEVICE int64_t statistics(const AttentionParams<T>& p, int query_head) const {
    return batch * p.stat_batch + query_head * p.stat_head + q_start;
  }
};

// The columns that some of 64 rows see are in [begin, end), which starts at a tile.
struct Range {
  int begin, end;
  template <bool kBand>
  static FA_DEVICE Range of(const Band& band, int columns) {
    if (!kBand) return {0, columns};
    return {max(band.low, 0) / kTile * kTile, min(band.high + kTile, columns)};
  }
};

template <class E>
FA_DEVICE Rows<E> query_rows(const Tensor4<E>& x, const Place& at, int head, int columns) {
  return rows_of(x, at.batch, head, at.q_start, at.q_len, columns);
}
template <class E>
FA_DEVICE Rows<E> key_rows(const Tensor4<E>& x, const Place& at, int columns) {
  return rows_of(x, at.batch, at.kv_head, at.kv_start, at.kv_len, columns);
}

// Which of the 64 keys from `first` on exist and are no padding: bit j % 32 of word j / 32, the
// same in all threads.
struct KeyBits {
  unsigned word[2];

  template <class T>
  FA_DEVICE KeyBits(const AttentionParams<T>& p, const Place& at, int first) {
    word[0] = word[1] = ~0u;
    if (!p.padding && first + kTile <= at.kv_len) return;
    word[0] = rows_left(at.kv_len, first);
    word[1] = rows_left(at.kv_len, first + 32);
    if (!p.padding) return;
    FA_UNROLL
    for (int n = 0; n < 2; ++n) {
      const int lane = threadIdx.x & 31, key = first + 32 * n + lane;
      const bool there = word[n] >> lane & 1;
      const uint8_t* padding = p.padding + at.batch * p.padding_batch;
      word[n] = __ballot_sync(~0u, there && padding[key * p.padding_key] == 0);
    }
  }
  FA_DEVICE bool none() const { return (word[0] | word[1]) == 0; }
  FA_DEVICE bool all() const { return (word[0] & word[1]) == ~0u; }
  // Bit i, or j: of a thread's row(i), or column(j).
  FA_DEVICE unsigned of_rows(const Lane& lane) const {
    return (lane.row_group < 8 ? word[0] : word[1]) >> (lane.row(0) & 31);
  }
  FA_DEVICE unsigned of_columns(const Lane& lane) const {
    return (word[0] >> lane.column(0) & 15) | (word[1] >> lane.column(0) & 15) << 4;
  }
};

}  // namespace fa
