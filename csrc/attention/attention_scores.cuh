// From products to probabilities: scale, attn_mask, hidden keys, saved log-sum-exp, dropout.
#pragma once

#include "attention/attention_place.cuh"
#include "common/philox.cuh"

namespace fa {

// Elements of a tile that padding, causal or window hide become `value`. `band` counts rows from
// the tile's first one; `column` is the tile's first column.
template <bool kBand, bool kKeyRows>
FA_DEVICE void hide(Fragment& s, const Band& band, const KeyBits& keys, int column, float value,
                    const Lane& lane) {
  if (keys.all() && !(kBand && band.cuts(column))) return;
  const unsigned mine = kKeyRows ? keys.of_rows(lane) : keys.of_columns(lane);
  const unsigned low = not_before(band.low), span = not_before(band.high) - low;
  const unsigned start = column + lane.column(0) - lane.row(0) - low;
  for_elements([&](int i, int j) {
    bool hidden = !(mine >> (kKeyRows ? i : j) & 1);
    if (kBand) hidden = hidden || start + ((j & 3) + 32 * (j >> 2) - i) > span;
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
FA_DEVICE void add_mask(Fragment& s, float scale, const E* first, int row, int column, bool aligned,
                        int rows, int columns, const Lane& lane) {
  using Word4 = typename Word<4 * sizeof(E)>::type;
  const bool whole = aligned && rows >= kTile && columns >= kTile;
  FA_UNROLL
  for (int n = 0; n < 8; ++n) {  // 4 consecutive keys of a query
    const int query = kKeyRows ? lane.column(n) : lane.row(n & 3);
    const int key = kKeyRows ? lane.row(0) : lane.column(n & 4);
    const E* from = first + static_cast<int64_t>(query) * row + static_cast<int64_t>(key) * column;
    E added[4];
    if (whole) {
      const Word4 word = load_global<Word4>(from);
      memcpy(static_cast<void*>(added), &word, sizeof word);
    } else {
      FA_UNROLL
      for (int c = 0; c < 4; ++c) {
        added[c] = E();
        if (query < rows && key + c < columns) added[c] = from[c * static_cast<int64_t>(column)];
      }
    }
    FA_UNROLL
    for (int c = 0; c < 4; ++c) {
      float& x = kKeyRows ? s[c][n] : s[n & 3][(n & 4) + c];
      x = fmaf(x, scale, mask_value(added[c]));
    }
  }
}

// The 4 x 8 elements of the products a thread owns: query row(i) and key column(j), or with
// kKeyRows key row(i) and query column(j). -inf where hidden. With kMask scaled and added to;
// otherwise the scale, positive, is left to who takes the exponential.
template <bool kBand, bool kMask, bool kKeyRows, class T>
FA_DEVICE void prepare_scores(Fragment& s, const AttentionParams<T>& p, const Place& at, int head,
                              const Band& band, const KeyBits& keys, int q_first, int k_first,
                              const Lane& lane) {
  if (kMask && p.mask_kind != kNoMask) {
    const auto& m = p.attn_mask;
    const int64_t offset = at.batch * m.batch + head * m.head +
                           static_cast<int64_t>(q_first) * m.row +
                           static_cast<int64_t>(k_first) * m.column;
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
  if (kMask && p.mask_kind == kNoMask) for_elements([&](int i, int j) { s[i][j] *= p.scale; });
  hide<kBand, kKeyRows>(s, band, keys, kKeyRows ? q_first : k_first, -infinity(), lane);
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

// What the backward keeps of the 64 queries of a tile of a head: lse, lse_low and
//   delta = rowsum(dO * O) + rowsum(dW * W) - dLSE.
// lse is inf for rows that see nothing, and those beyond the last: P = exp(s - inf) = 0.
struct RowStatistics {
  float lse[kTile], lse_low[kTile], delta[kTile];

  template <class T>
  static FA_DEVICE RowStatistics* of(const AttentionParams<T>& p, const Place& at, int head,
                                     int first) {
    const int64_t heads_before = at.stream(p, head);
    return reinterpret_cast<RowStatistics*>(p.rows) + heads_before * p.q_tiles + first / kTile;
  }
};

FA_DEVICE float probability(float s, float scale, float lse, float lse_low) {
  return fast_exp2((fmaf(s, scale, -lse) - lse_low) * kLog2E);
}

// x[j] = from[column(j)].
FA_DEVICE void load_columns(float (&x)[8], const float* from, const Lane& lane) {
  FA_UNROLL
  for (int j = 0; j < 8; j += 4) {
    const float4 quad = load_quad(from + lane.column(j));
    x[j] = quad.x, x[j + 1] = quad.y, x[j + 2] = quad.z, x[j + 3] = quad.w;
  }
}

}  // namespace fa
