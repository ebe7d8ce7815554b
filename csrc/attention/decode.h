// The forward for sequences of very few queries, as in decoding: keys and values are read where
// they are, once, since packing them would cost more than multiplying.
//
// A part is kSplitKeys keys of a key head, for all the queries that read it; its exponentials are
// those of its own maximum. Another pass adds the parts of a query up in their order. So a long
// cache keeps all threads busy, however few the heads, and how many threads there are changes
// nothing in the result. Bound by the bandwidth of memory.
#pragma once

#include "attention/pack.h"
#include "attention/softmax_rows.h"
#include "common/scratch.h"

namespace fastattn::FASTATTN_ISA {

inline constexpr int64_t kFewQueries = 4;   // the longest sequence of queries for which it pays
inline constexpr int64_t kSplitKeys = 512;  // of a part
inline constexpr int64_t kCachedKeys = 64;  // stay in the first-level cache from query to query

// Scores of one query, q[D] (zeros up to whole vectors), with keys [first, first + keys): hidden
// ones give 0 and are not read.
template <class Math>
__attribute__((noinline)) void score_keys(const typename Math::Sum* q, const Matrix& k,
                                          int64_t columns, int64_t first, int64_t keys,
                                          const uint8_t* hidden, typename Math::Sum* scores) {
  using Sum = typename Math::Sum;
  visit_storage<Sum>(k.dtype, [&](auto type) {
    using S = decltype(type);
    const bool whole = k.column_stride == 1 && columns % kLanes<Sum> == 0;
    for (int64_t j = 0; j < keys; ++j) {
      const S* row = k.at<const S>(first + j);
      Vec<Sum> sum{};
      if (hidden != nullptr && hidden[first + j] != 0) {
      } else if (whole) {
        for (int64_t d = 0; d < columns; d += kLanes<Sum>)
          sum += load<Sum>(q + d) * load<Sum>(row + d);
      } else {
        for (int64_t d = 0; d < columns; d += kLanes<Sum>)
          sum += load<Sum>(q + d) * load_units<Math>(row, k.column_stride, d, columns);
      }
      scores[j] = reduce_sum(sum);
    }
  });
}

// out[E] += sum_j p[j] * v[first + j], four values at a time; hidden ones are not read.
template <class Math>
__attribute__((noinline)) void add_values(const typename Math::Sum* p, const Matrix& v,
                                          int64_t columns, int64_t first, int64_t keys,
                                          const uint8_t* hidden, typename Math::Sum* out) {
  using Sum = typename Math::Sum;
  visit_storage<Sum>(v.dtype, [&](auto type) {
    using S = decltype(type);
    const bool whole = v.column_stride == 1 && columns % kLanes<Sum> == 0;
    const auto add_one = [&](int64_t j) {
      if (hidden != nullptr && hidden[first + j] != 0) return;
      const S* row = v.at<const S>(first + j);
      for (int64_t d = 0; d < columns; d += kLanes<Sum>)
        store(out + d,
              load<Sum>(out + d) + load_units<Math>(row, v.column_stride, d, columns) * p[j]);
    };
    int64_t j = 0;
    for (; whole && j + 4 <= keys; j += 4) {
      if (hidden != nullptr && load_raw<uint32_t>(hidden + first + j) != 0) {
        for (int64_t n = 0; n < 4; ++n) add_one(j + n);
        continue;
      }
      const S* row = v.at<const S>(first + j);
      for (int64_t d = 0; d < columns; d += kLanes<Sum>) {
        const S *a = row + d, *b = a + 2 * v.row_stride;
        const Vec<Sum> two = load<Sum>(a) * p[j] + load<Sum>(a + v.row_stride) * p[j + 1];
        const Vec<Sum> more = load<Sum>(b) * p[j + 2] + load<Sum>(b + v.row_stride) * p[j + 3];
        store(out + d, load<Sum>(out + d) + (two + more));
      }
    }
    for (; j < keys; ++j) add_one(j);
  });
}

template <class Sum>
struct DecodeSizes {
  int64_t queries, heads, splits;  // heads: query heads that a task takes at once
  int64_t q_stride, out_stride, k_len;

  DecodeSizes(const Problem& p, int64_t longest_q, int64_t longest_k, bool share_heads)
      : queries(longest_q),
        heads(share_heads ? p.group : 1),
        splits(max<int64_t>(1, (longest_k + kSplitKeys - 1) / kSplitKeys)),
        q_stride(round_up(p.qk_dim, kLanes<Sum>)),
        out_stride(round_up(p.v_dim, kLanes<Sum>)),
        k_len(longest_k) {}
};

// What the parts leave: for every query, split by split, the sum of exp * value, the maximum of the
// scores and the sum of the exponentials.
template <class Sum>
struct DecodeParts {
  Sum *out, *max, *total;  // [rows][splits][out_stride], [rows][splits], [rows][splits]

  DecodeParts(Carver& carver, const Problem& p, const DecodeSizes<Sum>& n) {
    const int64_t count = p.batch * p.heads * n.queries * n.splits;
    out = carver.take<Sum>(count * n.out_stride);
    max = carver.take<Sum>(count);
    total = carver.take<Sum>(count);
  }

  // Of query i of head h in sequence b.
  static int64_t row(const Problem& p, const DecodeSizes<Sum>& n, int64_t b, int64_t h, int64_t i) {
    return ((b * p.heads + h) * n.queries + i) * n.splits;
  }
};

template <class Math>
class DecodeTask {
  using Sum = typename Math::Sum;

  struct Scratch {
    Sum *q, *scores;  // [heads * queries][q_stride], [heads * queries][kScoreStride]
    uint8_t* hidden;  // [Lk]

    Scratch(Carver& carver, const DecodeSizes<Sum>& n)
        : q(carver.take<Sum>(n.heads * n.queries * n.q_stride)),
          scores(carver.take<Sum>(n.heads * n.queries * kScoreStride)),
          hidden(carver.take<uint8_t>(n.k_len)) {}
  };
  static constexpr int64_t kScoreStride = kSplitKeys + 64;

 public:
  DecodeTask(const AttentionForward& call, const Problem& problem, const DecodeSizes<Sum>& sizes,
             const DecodeParts<Sum>& parts)
      : call_(call),
        problem_(problem),
        n_(sizes),
        parts_(parts),
        scratch_(carve_scratch<Scratch>(sizes)) {}

  // Query heads [head, head + n_.heads), which read kv_head, and the split-th kSplitKeys keys.
  void run(int64_t b, int64_t kv_head, int64_t head, int64_t split) {
    const Sequence s = problem_.sequence(b);
    const HiddenKeys hidden = find_hidden_keys(call_.in, s.k_len, b, head, scratch_.hidden);
    const auto mask = [&](int64_t g) {
      return ScoreMask<Sum>(call_.in, call_.rules, s, b, head + g, hidden, false);
    };
    const Span part{split * kSplitKeys, (split + 1) * kSplitKeys};
    const Span seen = s.q_len == 0 ? Span{0, 0} : intersect(mask(0).keys(0, s.q_len - 1), part);
    const int64_t first = seen.begin / 4 * 4;  // where a block of random numbers begins
    const auto each_row = [&](const auto& f) {
      for (int64_t g = 0; g < n_.heads; ++g) {
        for (int64_t i = 0; i < s.q_len; ++i) f(g * n_.queries + i, g, i);
      }
    };
    const auto each_piece = [&](int64_t begin, const auto& f) {
      for (int64_t j = begin; j < seen.end; j += kCachedKeys)
        each_row([&](int64_t row, int64_t, int64_t) { f(row, j, min(kCachedKeys, seen.end - j)); });
    };

    for (int64_t g = 0; g < n_.heads; ++g)
      pack_rows<Math>(problem_.matrix(call_.in.q, b, head + g, s.q_begin), 0, s.q_len,
                      problem_.qk_dim, nullptr, scratch_.q + g * n_.queries * n_.q_stride,
                      n_.q_stride);
    const Matrix k = problem_.matrix(call_.in.k, b, kv_head, s.k_begin);
    each_piece(first, [&](int64_t row, int64_t j, int64_t keys) {
      score_keys<Math>(scratch_.q + row * n_.q_stride, k, problem_.qk_dim, j, keys, hidden.hidden,
                       scores(row) + (j - first));
    });
    each_row([&](int64_t row, int64_t g, int64_t i) {
      const int64_t at = DecodeParts<Sum>::row(problem_, n_, b, head + g, i) + split;
      __builtin_memset(parts_.out + at * n_.out_stride, 0,
                       static_cast<size_t>(n_.out_stride) * sizeof(Sum));
      exponentiate(mask(g), b, head + g, i, first, seen.end, scores(row), at);
    });
    const Matrix v = problem_.matrix(call_.in.v, b, kv_head, s.k_begin);
    each_piece(seen.begin, [&](int64_t row, int64_t j, int64_t keys) {
      const int64_t g = row / n_.queries, i = row % n_.queries;
      const int64_t at = DecodeParts<Sum>::row(problem_, n_, b, head + g, i) + split;
      add_values<Math>(scores(row) + (j - first), v, problem_.v_dim, j, keys, hidden.hidden,
                       parts_.out + at * n_.out_stride);
    });
  }

 private:
  Sum* scores(int64_t row) const { return scratch_.scores + row * kScoreStride; }

  // s: scores of query i with keys [key, end), to exponentials.
  void exponentiate(const ScoreMask<Sum>& mask, int64_t b, int64_t h, int64_t i, int64_t key,
                    int64_t end, Sum* s, int64_t at) const {
    const int64_t keys = max<int64_t>(end - key, 0), columns = round_up(keys, 2 * kLanes<Sum>);
    for (int64_t j = keys; j < columns; ++j) s[j] = 0;
    mask.apply(s, columns, i, key);
    const Sum high = maximum(s, columns), top = high == -kInfinity<Sum> ? 0 : high;
    const Sum factor = mask.remaining_scale() * static_cast<Sum>(kLog2E);
    parts_.max[at] = high;
    if (call_.rules.dropout.p > 0) {
      const DropoutRow dropout(call_.rules.dropout, static_cast<uint32_t>(i),
                               static_cast<uint32_t>(b * problem_.heads + h));
      parts_.total[at] = exponentials(s, columns, top, factor, s, dropout, key);
    } else {
      parts_.total[at] = exponentials(s, columns, top, factor, s);
    }
  }

  const AttentionForward& call_;
  const Problem& problem_;
  const DecodeSizes<Sum>& n_;
  const DecodeParts<Sum>& parts_;
  const Scratch scratch_;
};

// Adds up the parts of query i of head h in sequence b, into the first, and stores the results.
template <class Math>
void finish_decoding(const AttentionForward& call, const Problem& p,
                     const DecodeSizes<typename Math::Sum>& n,
                     const DecodeParts<typename Math::Sum>& parts, int64_t b, int64_t h,
                     int64_t i) {
  using Sum = typename Math::Sum;
  const Sequence s = p.sequence(b);
  const ScoreMask<Sum> mask(call.in, call.rules, s, b, h, {}, false);
  const Sum factor = mask.remaining_scale() * static_cast<Sum>(kLog2E);
  const int64_t row = DecodeParts<Sum>::row(p, n, b, h, i);
  Sum high = -kInfinity<Sum>, total = 0;
  for (int64_t split = 0; split < n.splits; ++split) high = max(high, parts.max[row + split]);
  Sum* sum = parts.out + row * n.out_stride;
  for (int64_t split = 0; split < n.splits; ++split) {
    const Sum top = parts.max[row + split];
    const Sum share = top == -kInfinity<Sum> ? 0 : exp2(splat((top - high) * factor))[0];
    const Sum* part = sum + split * n.out_stride;
    total += parts.total[row + split] * share;
    for (int64_t d = 0; d < n.out_stride; d += kLanes<Sum>) {
      const Vec<Sum> scaled = load<Sum>(part + d) * share;
      store(sum + d, split == 0 ? scaled : load<Sum>(sum + d) + scaled);
    }
  }
  const Matrix out = p.matrix(call.out, b, h, s.q_begin);
  visit_storage<Sum>(out.dtype, [&](auto type) {
    store_output_row(out, i, p.v_dim, sum, total, final_factor(call.rules.dropout, total), type);
  });
  store_log_sum_exp(call, p.cu_q == nullptr ? b : 0, h, s.q_begin + i,
                    high * mask.remaining_scale(), total);
}

}  // namespace fastattn::FASTATTN_ISA
