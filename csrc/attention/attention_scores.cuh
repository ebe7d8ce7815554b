// From products to probabilities: scale, attn_mask, hidden keys, saved log-sum-exp, dropout.
#pragma once

#include "attention/attention_place.cuh"
#include "common/philox.cuh"

namespace fa {

// Elements of a tile that padding, causal or window hide become `value`.
template <bool kBand, bool kKeyRows>
FA_DEVICE void hide(Fragment& s, const Place& at, const KeyBits& keys, int q_first, int k_first,
                    float value, const Lane& lane) {
  if (keys.all() && !(kBand && at.band.cuts(q_first, k_first))) return;
  for_elements([&](int i, int j) {
    const int key = kKeyRows ? lane.row(i) : lane.column(j);
    const int query = kKeyRows ? lane.column(j) : lane.row(i);
    bool hidden = !keys.has(key);
    if (kBand) hidden = hidden || at.band.hides(k_first + key - (q_first + query));
    if (hidden) s[i][j] = value;
  });
}

// What an element of a mask adds to its score.
FA_DEVICE float mask_value(uint8_t keep) {
  return keep ? 0.f : -infinity();
}
FA_DEVICE float mask_value(float x) {
  return x;
}
FA_DEVICE float mask_value(__half x) {
  return to_float(x);
}
FA_DEVICE float mask_value(__nv_bfloat16 x) {
  return to_float(x);
}

// s = scale * s + mask for one tile of a head's mask of E; `first` points at the tile's corner.
template <bool kKeyRows, class E>
FA_DEVICE void add_mask(Fragment& s, float scale, const E* first, int64_t row, int64_t column,
                        bool aligned, int rows, int columns, const Lane& lane) {
  using Word4 = typename Word<4 * sizeof(E)>::type;
  const bool whole = aligned && rows >= kTile && columns >= kTile;
  FA_UNROLL
  for (int n = 0; n < 8; ++n) {  // 4 consecutive keys of a query
    const int query = kKeyRows ? lane.column(n) : lane.row(n & 3);
    const int key = kKeyRows ? lane.row(0) : lane.column(n & 4);
    const E* from = first + query * row + key * column;
    E added[4];
    if (whole) {
      const Word4 word = load_global<Word4>(from);
      memcpy(static_cast<void*>(added), &word, sizeof word);
    } else {
      FA_UNROLL
      for (int c = 0; c < 4; ++c) {
        added[c] = E();
        if (query < rows && key + c < columns) added[c] = from[c * column];
      }
    }
    FA_UNROLL
    for (int c = 0; c < 4; ++c) {
      float& x = kKeyRows ? s[c][n] : s[n & 3][(n & 4) + c];
      x = fmaf(x, scale, mask_value(added[c]));
    }
  }
}

// What prepare_scores leaves to be multiplied with.
template <bool kMask, class T>
FA_DEVICE float score_scale(const AttentionParams<T>& p) {
  return kMask && p.mask_kind != kNoMask ? 1.f : p.scale;
}

// The 4 x 8 elements of the products a thread owns: query row(i) and key column(j), or with
// kKeyRows key row(i) and query column(j). -inf where hidden; with a mask also scaled and added to.
template <bool kBand, bool kMask, bool kKeyRows, class T>
FA_DEVICE void prepare_scores(Fragment& s, const AttentionParams<T>& p, const Place& at, int head,
                              const KeyBits& keys, int q_first, int k_first, const Lane& lane) {
  if (p.scale_sign < 0) for_elements([&](int i, int j) { s[i][j] = -s[i][j]; });
  if (kMask && p.mask_kind != kNoMask) {
    const auto& m = p.attn_mask;
    const int64_t offset =
        at.batch * m.batch + head * m.head + q_first * m.row + k_first * m.column;
    const int rows = at.q_len - q_first, columns = at.kv_len - k_first;
    const bool aligned = m.aligned != 0;
    if (p.mask_kind == kBoolMask)
      add_mask<kKeyRows>(s, p.scale, static_cast<const uint8_t*>(m.data) + offset, m.row, m.column,
                         aligned, rows, columns, lane);
    else if (sizeof(T) < 4 && p.mask_kind == kOwnMask)
      add_mask<kKeyRows>(s, p.scale, static_cast<const T*>(m.data) + offset, m.row, m.column,
                         aligned, rows, columns, lane);
    else
      add_mask<kKeyRows>(s, p.scale, static_cast<const float*>(m.data) + offset, m.row, m.column,
                         aligned, rows, columns, lane);
  }
  hide<kBand, kKeyRows>(s, at, keys, q_first, k_first, -infinity(), lane);
}

// Of 4 keys from a multiple of 4 on: whether the query keeps them.
struct Keep {
  bool key[4];

  FA_DEVICE Keep(const Dropout& dropout, int query, int key, int stream) {
    const uint4 words = dropout.words(key >> 2, query, stream);
    this->key[0] = words.x >= dropout.threshold, this->key[1] = words.y >= dropout.threshold;
    this->key[2] = words.z >= dropout.threshold, this->key[3] = words.w >= dropout.threshold;
  }
};

// Dropped weights of a tile with query rows become 0.
template <class T>
FA_DEVICE void drop(Fragment& s, const AttentionParams<T>& p, const Place& at, int q_first,
                    int k_first, const Lane& lane) {
  const Dropout dropout(p.dropout);
  FA_UNROLL
  for (int n = 0; n < 8; ++n) {
    const int i = n & 3, j = n & 4;
    const Keep keep(dropout, q_first + lane.row(i), k_first + lane.column(j),
                    at.stream(p, at.head));
    FA_UNROLL
    for (int c = 0; c < 4; ++c)
      if (!keep.key[c]) s[i][j + c] = 0;
  }
}

// What was saved of a query's row, to compute its probabilities again.
struct RowStatistics {
  float lse, lse_low, delta;

  // Rows that see nothing, and rows that are not there, get P = exp(s - inf) = 0.
  template <class T>
  FA_DEVICE RowStatistics(const AttentionParams<T>& p, int64_t start, int row, int rows)
      : lse(infinity()), lse_low(0), delta(0) {
    if (row >= rows) return;
    lse = p.lse[start + row];
    lse_low = p.lse_low[start + row];
    if (p.delta) delta = p.delta[start + row];
    if (lse == -infinity()) lse = infinity();
  }
  FA_DEVICE float probability(float s, float scale) const {
    return fast_exp2((fmaf(s, scale, -lse) - lse_low) * kLog2E);
  }
};

}  // namespace fa
