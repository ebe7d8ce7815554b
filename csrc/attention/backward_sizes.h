// What a thread computes of the backward, and the memory it needs for that.
#pragma once

#include "attention/backward_gradient.h"
#include "attention/pack.h"
#include "attention/problem.h"
#include "common/scratch.h"

namespace fastattn::FASTATTN_ISA {

inline constexpr int64_t kBlockKeys = 128;
inline constexpr int64_t kBlockQueries = 128;
inline constexpr int64_t kStrip = 512;                   // queries; whole blocks of them
inline constexpr int64_t kLineStride = kBlockKeys + 16;  // lines of a buffer apart in the cache

// The gradients of keys `keys` if `of_keys`, and those of queries `queries` (of every head that
// reads the key head) if `of_queries`. Sums run over all `queries` and all `keys`.
struct BackwardPart {
  int64_t batch, kv_head;
  Span queries, keys;
  bool of_queries, of_keys;
};

// f(first, count) for every kTileRows of some rows.
template <class F>
FASTATTN_INLINE void for_each_tile(Span rows, const F& f) {
  for (int64_t r = rows.begin; r < rows.end; r += kTileRows)
    f(r, static_cast<int>(min<int64_t>(kTileRows, rows.end - r)));
}

// The same for keys of a block, counted from its begin; no panel is cut.
template <class Unit, class F>
FASTATTN_INLINE void for_each_key_tile(int64_t keys, const F& f) {
  for (int64_t key = 0, count; key < keys; key += count) {
    count = min(min<int64_t>(kTileRows, kPanel<Unit> - key % kPanel<Unit>), keys - key);
    f(key, static_cast<int>(count));
  }
}

// How often one of some queries meets a block of keys, about.
inline int64_t count_meetings(const Diagonal& diagonal, Span queries, Span keys) {
  int64_t count = 0;
  for (int64_t i = queries.begin; i < queries.end; i += kBlockQueries) {
    const int64_t end = min(i + kBlockQueries, queries.end);
    const Span seen = intersect(diagonal.keys(i, end - 1), keys);
    if (!seen.empty()) count += (end - i) * ((seen.end - seen.begin - 1) / kBlockKeys + 1);
  }
  return count;
}

template <class Math>
struct BackwardSizes {
  int64_t queries, k_len;  // the longest part's, the longest sequence's
  int64_t group;           // query heads per key head
  int64_t qk_dim, v_dim;
  int64_t qk_stride, v_stride;  // whole panels

  BackwardSizes(const Problem& p, int64_t longest_part, int64_t longest_k)
      : queries(longest_part),
        k_len(longest_k),
        group(p.group),
        qk_dim(p.qk_dim),
        v_dim(p.v_dim),
        qk_stride(round_up(p.qk_dim, kPanel<typename Math::Unit>)),
        v_stride(round_up(p.v_dim, kPanel<typename Math::Unit>)) {}
};

template <class Sum>
struct BackwardScratch {
  Sum *q, *grad_out;              // [group * queries][qk_stride], [...][v_stride]
  Sum *k_panels, *v_panels, *k;   // [panels][D][kPanel], [panels][E][kPanel], [block][qk_stride]
  Sum *weights, *grad_scores;     // [kBlockQueries][kLineStride]: W, and z'
  Sum *grad_q, *grad_k, *grad_v;  // [group * queries][qk_stride], [block][...], [block][...]
  Sum *strip_k, *strip_v;         // [block][...]
  Sum *delta, *lse, *lse_low;     // [group * queries]
  Place* sums_of_queries;         // [group * queries], by the first row of a tile
  uint8_t* hidden;                // [Lk]

  template <class Sizes>
  BackwardScratch(Carver& carver, const Sizes& n) {
    const int64_t rows = n.group * n.queries;
    q = carver.take<Sum>(rows * n.qk_stride);
    grad_out = carver.take<Sum>(rows * n.v_stride);
    k_panels = carver.take<Sum>(kBlockKeys * n.qk_dim);
    v_panels = carver.take<Sum>(kBlockKeys * n.v_dim);
    k = carver.take<Sum>(kBlockKeys * n.qk_stride);
    weights = carver.take<Sum>(kBlockQueries * kLineStride);
    grad_scores = carver.take<Sum>(kBlockQueries * kLineStride);
    grad_q = carver.take<Sum>(rows * n.qk_stride);
    grad_k = carver.take<Sum>(kBlockKeys * n.qk_stride);
    grad_v = carver.take<Sum>(kBlockKeys * n.v_stride);
    strip_k = carver.take<Sum>(kBlockKeys * n.qk_stride);
    strip_v = carver.take<Sum>(kBlockKeys * n.v_stride);
    delta = carver.take<Sum>(rows);
    lse = carver.take<Sum>(rows);
    lse_low = carver.take<Sum>(rows);
    sums_of_queries = carver.take<Place>(rows);
    hidden = carver.take<uint8_t>(n.k_len);
  }
};

}  // namespace fastattn::FASTATTN_ISA
