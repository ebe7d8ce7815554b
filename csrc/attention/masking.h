// What stands between a score and its exponential: scale, masks, hidden keys, the diagonal.
#pragma once

#include "attention/pack.h"
#include "attention/problem.h"

namespace fastattn::FASTATTN_ISA {

// Keys that no query of a head sees, by key_padding_mask or by a bool attn_mask that is the same
// for all queries; true for most padding. Such keys are never read.
struct HiddenKeys {
  const uint8_t* hidden = nullptr;  // [Lk], or null: none is hidden
  Span visible;                     // from the first visible key to the last
};

// attn_mask, if it is one row for all queries of a head.
inline bool is_key_mask(const TensorView& mask) {
  return mask.dtype == DType::boolean && (mask.size[2] == 1 || mask.stride[2] == 0);
}

inline int64_t broadcast_stride(const TensorView& x, int dim) {
  return x.size[dim] == 1 ? 0 : x.stride[dim];
}

// `buffer` holds Lk bytes.
inline HiddenKeys find_hidden_keys(const AttentionInputs& in, int64_t k_len, int64_t b, int64_t h,
                                   uint8_t* buffer) {
  const bool by_mask = in.attn_mask && is_key_mask(in.attn_mask);
  if (!in.key_padding_mask && !by_mask) return {nullptr, {0, k_len}};
  __builtin_memset(buffer, 0, static_cast<size_t>(k_len));
  if (in.key_padding_mask) {
    const TensorView& m = in.key_padding_mask;
    const bool* padding = m.as<const bool>() + b * m.stride[0];
    for (int64_t j = 0; j < k_len; ++j) buffer[j] = padding[j * m.stride[1]];
  }
  if (by_mask) {
    const TensorView& m = in.attn_mask;
    const bool* keep = m.as<const bool>() + b * broadcast_stride(m, 0) + h * broadcast_stride(m, 1);
    const int64_t stride = broadcast_stride(m, 3);
    for (int64_t j = 0; j < k_len; ++j) buffer[j] |= !keep[j * stride];
  }
  Span visible{0, k_len};
  while (!visible.empty() && buffer[visible.begin] != 0) ++visible.begin;
  while (!visible.empty() && buffer[visible.end - 1] != 0) --visible.end;
  bool holes = false;
  const int64_t panel = visible.begin / 32 * 32;  // keys are packed from here on, at the latest
  for (int64_t j = panel; j < visible.end; ++j) holes |= buffer[j] != 0;
  return {holes ? buffer : nullptr, visible};
}

// Turns raw products q . k of one head into z. C is the type of the scores.
template <class C>
class ScoreMask {
 public:
  // always_scale: z is wanted even where the raw product, times a positive scale, would do.
  ScoreMask(const AttentionInputs& in, const AttentionRules& rules, const Sequence& s, int64_t b,
            int64_t h, const HiddenKeys& keys, bool always_scale)
      : diagonal_(rules, s), keys_(keys), scale_(static_cast<C>(rules.scale)) {
    const TensorView& m = in.attn_mask;
    if (m && !is_key_mask(m)) {
      dtype_ = m.dtype;
      row_stride_ = broadcast_stride(m, 2);
      column_stride_ = broadcast_stride(m, 3);
      const int64_t offset = b * broadcast_stride(m, 0) + h * broadcast_stride(m, 1);
      const int64_t bytes = m.dtype == DType::boolean   ? 1
                            : m.dtype == DType::float64 ? 8
                            : m.dtype == DType::float32 ? 4
                                                        : 2;
      mask_ = m.as<const char>() + offset * bytes;
    }
    const bool adds = dtype_ != DType::none && dtype_ != DType::boolean;
    scales_ = always_scale || adds || !(scale_ > 0);
  }

  // What is left to multiply z with before the exponential, and to bring a maximum to z.
  C remaining_scale() const { return scales_ ? 1 : scale_; }

  // Keys that a query sees, of those not hidden at either end.
  Span keys(int64_t i) const { return intersect(diagonal_.keys(i), keys_.visible); }
  Span keys(int64_t first, int64_t last) const {
    return intersect(diagonal_.keys(first, last), keys_.visible);
  }

  // s[0, columns) are the products of query i with keys `key`, `key` + 1, ...; columns is a
  // multiple of the lanes, and products beyond the last key are finite.
  FASTATTN_INLINE void apply(C* s, int64_t columns, int64_t i, int64_t key) const {
    const Span seen = keys(i);
    const int64_t from = max<int64_t>(seen.begin - key, 0), to = min(seen.end - key, columns);
    if (scales_ || dtype_ != DType::none || keys_.hidden != nullptr) rewrite(s, from, to, i, key);
    const Vec<C> hidden = splat(-kInfinity<C>);
    for (int64_t j = 0; j < min(from, columns); j += kLanes<C>)
      store(s + j, first_lanes<C>(from - j) ? hidden : load<C>(s + j));
    for (int64_t j = max<int64_t>(to, 0) / kLanes<C> * kLanes<C>; j < columns; j += kLanes<C>)
      store(s + j, first_lanes<C>(to - j) ? load<C>(s + j) : hidden);
  }

 private:
  // Scale, mask and hidden keys on s[from, to).
  __attribute__((noinline)) void rewrite(C* s, int64_t from, int64_t to, int64_t i,
                                         int64_t key) const {
    const auto each = [&](const auto& f) __attribute__((always_inline)) {
      for (int64_t j = from / kLanes<C> * kLanes<C>; j < to; j += kLanes<C>) {
        const int64_t n = min<int64_t>(to - j, kLanes<C>);
        store(s + j, f(load<C>(s + j), j, n));
      }
    };
    if (dtype_ == DType::boolean) {
      const bool* row = static_cast<const bool*>(mask_) + i * row_stride_ + key * column_stride_;
      const C factor = scales_ ? scale_ : 1;
      each([&](Vec<C> z, int64_t j, int64_t n) __attribute__((always_inline)) {
        const auto keep = load_mask<C>(row + j * column_stride_, column_stride_, n);
        return keep ? z * factor : splat(-kInfinity<C>);
      });
    } else if (dtype_ != DType::none) {
      visit_float(dtype_, [&](auto type) {
        using S = decltype(type);
        if constexpr (kCanLoad<C, S>) {
          const S* row = static_cast<const S*>(mask_) + i * row_stride_ + key * column_stride_;
          each([&](Vec<C> z, int64_t j, int64_t n) __attribute__((always_inline)) {
            const bool whole = column_stride_ == 1 && n == kLanes<C>;
            const Vec<C> bias = whole
                                    ? load<C>(row + j)
                                    : load_strided<C>(row + j * column_stride_, column_stride_, n);
            return z * scale_ + bias;
          });
        }
      });
    } else if (scales_) {
      each([&](Vec<C> z, int64_t, int64_t) __attribute__((always_inline)) { return z * scale_; });
    }
    if (keys_.hidden != nullptr) {
      const bool* hidden = reinterpret_cast<const bool*>(keys_.hidden) + key;
      each([&](Vec<C> z, int64_t j, int64_t n) __attribute__((always_inline)) {
        return load_mask<C>(hidden + j, 1, n) ? splat(-kInfinity<C>) : z;
      });
    }
  }

  Diagonal diagonal_;
  HiddenKeys keys_;
  C scale_;
  bool scales_;
  DType dtype_ = DType::none;
  const void* mask_ = nullptr;
  int64_t row_stride_ = 0, column_stride_ = 0;
};

// The panels of a block of keys that some of a few queries see something of.
template <class Unit>
struct KeyWindow {
  Span seen;       // keys that the queries see; nothing else of the window is defined if empty
  int64_t panel;   // the first panel, counted from the block's begin
  int64_t key;     // its first key
  int64_t panels;  // how many

  template <class C>
  KeyWindow(const ScoreMask<C>& mask, Span block, int64_t query, int queries)
      : seen(intersect(mask.keys(query, query + queries - 1), block)),
        panel((seen.begin - block.begin) / kPanel<Unit>),
        key(block.begin + panel * kPanel<Unit>),
        panels((seen.end - key + kPanel<Unit> - 1) / kPanel<Unit>) {}

  int64_t columns() const { return panels * kPanel<Unit>; }
};

// f(j, mask) for every vector of `columns` scores that begin at key `key`, a multiple of 4: -1
// where dropout keeps, 0 where it drops. `columns` is a multiple of the lanes of C.
template <class C, class F>
FASTATTN_INLINE void for_each_keep(const DropoutRow& row, int64_t key, int64_t columns,
                                   const F& f) {
  constexpr int lanes = kLanes<C>;
  for (int64_t j = 0; j < columns; j += DropoutRow::kColumns) {
    Vec<int32_t> keep[DropoutRow::kVectors];
    row.keep(static_cast<uint32_t>(key + j), keep);
#pragma GCC unroll 4
    for (int v = 0; v < DropoutRow::kColumns / lanes; ++v) {
      if (j + v * lanes >= columns) return;
      if constexpr (sizeof(C) == 4) {
        f(j + v * lanes, keep[v]);
      } else {
        VecN<int32_t, lanes> half;
        __builtin_memcpy(&half, reinterpret_cast<const char*>(keep) + v * sizeof half, sizeof half);
        f(j + v * lanes, __builtin_convertvector(half, Vec<int64_t>));
      }
    }
  }
}

}  // namespace fastattn::FASTATTN_ISA
