// Where a block works, and which keys are there for it to see: sequence and head, the band of
// causal and window, padding.
#pragma once

#include "attention/attention_tile.cuh"

namespace fa {

constexpr int kFar = 1 << 30;  // beyond any distance between a query and a key

// Key j is visible to query i if low <= j - i <= high.
struct Band {
  int low, high;
  FA_DEVICE bool hides(int distance) const { return distance < low || distance > high; }
  // Of a tile of 64 queries from q on and 64 keys from k on: all of it is outside; some is.
  FA_DEVICE bool misses(int q, int k) const {
    return k - q + (kTile - 1) < low || k - q - (kTile - 1) > high;
  }
  FA_DEVICE bool cuts(int q, int k) const {
    return k - q - (kTile - 1) < low || k - q + (kTile - 1) > high;
  }
};

// One sequence and query head, and the tile of it that is the block's. Blocks are numbered heads
// first, so that the heads' longest tiles start together.
struct Place {
  int batch, head, kv_head, tile, q_len, kv_len;
  int64_t q_start, kv_start;
  Band band;

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
      q_len = p.cu_seqlens_q[batch + 1] - static_cast<int>(q_start);
      kv_start = p.cu_seqlens_k[batch];
      kv_len = p.cu_seqlens_k[batch + 1] - static_cast<int>(kv_start);
    }
    const int diagonal = p.bottom_right ? kv_len - q_len : 0;
    band.low = p.window_left < 0 ? -kFar : max(diagonal - p.window_left, -kFar);
    band.high = p.window_right < 0 ? kFar : min(diagonal + p.window_right, kFar);
    if (p.is_causal) band.high = min(band.high, diagonal);
  }

  // Keys that some of the 64 queries from `first` on see are in [first_key, last_key).
  FA_DEVICE int first_key(int first) const { return max(first + band.low, 0) / kTile * kTile; }
  FA_DEVICE int last_key(int first) const { return min(first + kTile + band.high, kv_len); }
  // Queries that see some of the 64 keys from `first` on are in [first_query, last_query).
  FA_DEVICE int first_query(int first) const { return max(first - band.high, 0) / kTile * kTile; }
  FA_DEVICE int last_query(int first) const { return min(first + kTile - band.low, q_len); }

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
  FA_DEVICE bool has(int key) const { return (key < 32 ? word[0] : word[1]) >> (key & 31) & 1; }
};

}  // namespace fa
