// The forward of attention on one thread, for a chunk of queries of heads that share a key head.
//
// Keys are taken in blocks. A block's keys become panels and its values rows (pack.h); then, for
// every kTileRows queries: scores of the whole block into a buffer that stays in cache, masks,
// maximum, exponentials, and the product with the values added to the output so far, which is
// brought to the new maximum first (online softmax, Milakov and Gimelshein 2018). Causal, window
// and padding cut the blocks, and the panels of a block, that nobody sees.
//
// 4 * D multiply-adds per query and key are the cost, at the peak of the multiply-add units; the
// exponential adds about a tenth at D = 64.
#pragma once

#include "attention/few.h"
#include "attention/masking.h"
#include "attention/pack.h"
#include "attention/prefetch.h"
#include "attention/problem.h"
#include "common/scratch.h"
#include "common/simd_math.h"

namespace fastattn::FASTATTN_ISA {

// Queries of a sequence up to which keys and values are not packed.
inline constexpr int64_t kFewQueries = 4;

// Keys of a block, so that packed keys and values stay in the second-level cache.
inline int64_t key_block(int64_t qk_dim, int64_t v_dim) {
  const int64_t dims = qk_dim + v_dim;
  return dims <= 256 ? 512 : dims <= 512 ? 256 : 128;
}

// Queries [first, first + rows) of the heads [head, head + heads) of sequence `batch`, which all
// read the keys of `kv_head`.
struct ForwardChunk {
  int64_t batch, kv_head, head, heads, first, rows;
};

template <class Math>
struct ForwardSizes {
  int64_t rows, block, steps, out_stride, score_stride, k_len;

  ForwardSizes(const Problem& p, int64_t max_rows, int64_t longest)
      : rows(max_rows),
        block(min(key_block(p.qk_dim, p.v_dim), round_up(longest, kPanel<typename Math::Unit>))),
        steps(steps_of<Math>(p.qk_dim)),
        out_stride(round_up(p.v_dim, kPanel<typename Math::Unit>)),
        score_stride(block + 16),
        k_len(longest) {}
};

template <class Math>
struct ForwardScratch {
  using Unit = typename Math::Unit;
  using Sum = typename Math::Sum;
  Unit *q, *k, *v, *p;  // [rows][q_stride], [panels][steps][kPanel], [block / kPack][out_stride],
                        // [kTileRows][score_stride / kPack]
  Sum *scores, *out;    // [kTileRows][score_stride], [rows][out_stride]
  Sum *max, *total;     // [rows], of the keys so far
  uint8_t* hidden;      // [Lk]

  ForwardScratch(Carver& carver, const ForwardSizes<Math>& n)
      : q(carver.take<Unit>(n.rows * round_up(n.steps, kLanes<Unit>))),
        k(carver.take<Unit>(n.block * n.steps)),
        v(carver.take<Unit>(n.block / Math::kPack * n.out_stride)),
        p(carver.take<Unit>(Math::kPack == 1 ? 0 : kTileRows * n.score_stride / Math::kPack)),
        scores(carver.take<Sum>(kTileRows * n.score_stride)),
        out(carver.take<Sum>(n.rows * n.out_stride)),
        max(carver.take<Sum>(n.rows)),
        total(carver.take<Sum>(n.rows)),
        hidden(carver.take<uint8_t>(n.k_len)) {
    if (Math::kPack == 1) p = reinterpret_cast<Unit*>(scores);
  }
};

template <class Math>
class ForwardTask {
  using Unit = typename Math::Unit;
  using Sum = typename Math::Sum;
  using Weight = std::conditional_t<Math::kPack == 2, bfloat16, Unit>;  // of P as it is multiplied

 public:
  ForwardTask(const AttentionForward& call, const Problem& problem, const ForwardSizes<Math>& sizes)
      : call_(call),
        problem_(problem),
        n_(sizes),
        q_stride_(round_up(sizes.steps, kLanes<Unit>)),
        scratch_(carve_scratch<ForwardScratch<Math>>(sizes)) {}

  // `next` is a guess at the chunk that this thread takes next.
  void run(const ForwardChunk& chunk, const ForwardChunk& next) {
    chunk_ = chunk;
    sequence_ = problem_.sequence(chunk.batch);
    few_ = Math::kPack == 1 && sequence_.q_len <= kFewQueries;
    if (!few_) prefetch(next);
    const HiddenKeys hidden =
        find_hidden_keys(call_.in, sequence_.k_len, chunk.batch, chunk.head, scratch_.hidden);
    begin_rows();
    const Span seen = mask(chunk.head, hidden).keys(chunk.first, chunk.first + chunk.rows - 1);
    const int64_t begin = seen.begin / kPanel<Unit> * kPanel<Unit>;
    for (int64_t key = begin; key < seen.end; key += n_.block) {
      const Span block{key, min(key + n_.block, seen.end)};
      pack_keys(block, hidden);
      pack_values(block, hidden);
      for (int64_t g = 0; g < chunk.heads; ++g) {
        const ScoreMask<Sum> scores = mask(chunk.head + g, hidden);
        for (int64_t r = 0; r < chunk.rows; r += kTileRows)
          add_block(scores, block, g, r, static_cast<int>(min<int64_t>(kTileRows, chunk.rows - r)));
      }
    }
    for (int64_t g = 0; g < chunk.heads; ++g) finish(mask(chunk.head + g, hidden), g);
    if (call_.weights) write_weights(hidden, {begin, seen.end});
  }

 private:
  ScoreMask<Sum> mask(int64_t head, const HiddenKeys& hidden) const {
    return {call_.in, call_.rules, sequence_, chunk_.batch, head, hidden, false};
  }

  Matrix q_matrix(int64_t g) const {
    return problem_.matrix(call_.in.q, chunk_.batch, chunk_.head + g, sequence_.q_begin);
  }

  void prefetch(const ForwardChunk& next) {
    const int64_t b = next.batch, size = problem_.v_dim;
    const int64_t steps = chunk_.heads * chunk_.rows;
    const Sequence s = problem_.sequence(b);
    if (s.k_len > n_.block || next.rows <= 0) return;
    prefetcher_.add(problem_.matrix(call_.in.q, b, next.head, s.q_begin), next.first, next.rows,
                    problem_.qk_dim, steps);
    if (b == chunk_.batch && next.kv_head == chunk_.kv_head) return;
    prefetcher_.add(problem_.matrix(call_.in.k, b, next.kv_head, s.k_begin), 0, s.k_len,
                    problem_.qk_dim, steps);
    prefetcher_.add(problem_.matrix(call_.in.v, b, next.kv_head, s.k_begin), 0, s.k_len, size,
                    steps);
  }

  void begin_rows() {
    if (few_ || !is_operand<Math>(q_matrix(0), problem_.qk_dim)) {
      for (int64_t g = 0; g < chunk_.heads; ++g)
        pack_rows<Math>(q_matrix(g), chunk_.first, chunk_.rows, problem_.qk_dim, nullptr,
                        scratch_.q + g * chunk_.rows * q_stride_, q_stride_);
    }
    for (int64_t r = 0; r < chunk_.heads * chunk_.rows; ++r) {
      scratch_.max[r] = -kInfinity<Sum>;
      scratch_.total[r] = 0;
    }
  }

  // Queries from the chunk's r-th on.
  Operand<Unit> queries(int64_t g, int64_t r) const {
    const Matrix q = q_matrix(g);
    if (!few_ && is_operand<Math>(q, problem_.qk_dim)) return as_operand<Math>(q, chunk_.first + r);
    return {scratch_.q + (g * chunk_.rows + r) * q_stride_, q_stride_};
  }

  void pack_keys(Span block, const HiddenKeys& hidden) {
    hidden_ = hidden.hidden;
    if (few_) return;
    const Matrix k = problem_.matrix(call_.in.k, chunk_.batch, chunk_.kv_head, sequence_.k_begin);
    pack_panels<Math>(k, block.begin, block.end - block.begin, problem_.qk_dim, hidden.hidden,
                      scratch_.k);
  }

  // Values are read where they are if they lie in one piece that fills whole panels.
  void pack_values(Span block, const HiddenKeys& hidden) {
    if (few_) return;
    const Matrix v = problem_.matrix(call_.in.v, chunk_.batch, chunk_.kv_head, sequence_.k_begin);
    if (Math::kPack == 1 && is_operand<Math>(v, problem_.v_dim) && hidden.hidden == nullptr &&
        problem_.v_dim == n_.out_stride && v.row_stride == problem_.v_dim) {
      values_ = as_operand<Math>(v, block.begin);
      return;
    }
    pack_row_groups<Math>(v, block.begin, block.end - block.begin, problem_.v_dim, hidden.hidden,
                          scratch_.v, n_.out_stride);
    values_ = {scratch_.v, n_.out_stride};
  }

  using Window = KeyWindow<Unit>;

  void multiply_scores(const Window& w, int64_t g, int64_t r, int rows) {
    const Operand<Unit> q = queries(g, r);
    if constexpr (Math::kPack == 1) {
      if (few_) {
        const Matrix k =
            problem_.matrix(call_.in.k, chunk_.batch, chunk_.kv_head, sequence_.k_begin);
        const int64_t keys = w.seen.end - w.key;
        for (int n = 0; n < rows; ++n) {
          Sum* scores = scratch_.scores + n * n_.score_stride;
          score_few<Math>(q.data + n * q.stride, k, problem_.qk_dim, w.key, keys, hidden_, scores);
          for (int64_t j = keys; j < w.columns(); ++j) scores[j] = 0;
        }
        return;
      }
    }
    multiply_panels<Math>(rows, n_.steps, w.panels, q.data, q.stride,
                          scratch_.k + w.panel * kPanel<Unit> * n_.steps, scratch_.scores,
                          n_.score_stride);
  }

  // Adds the keys of a block to rows [r, r + rows) of the chunk's g-th head.
  void add_block(const ScoreMask<Sum>& mask, Span block, int64_t g, int64_t r, int rows) {
    const int64_t i = chunk_.first + r, row = g * chunk_.rows + r;
    const Window w(mask, block, i, rows);
    if (w.seen.empty()) return;
    multiply_scores(w, g, r, rows);
    exponentiate(mask, w, row, i, rows);
    if (call_.rules.dropout.p > 0) drop(w, g, i, rows);

    const bool is_first = mask.keys(i, i + rows - 1).begin >= block.begin;
    const int64_t skip = (w.seen.begin - w.key) / Math::kPack;
    Sum* out = scratch_.out + row * n_.out_stride;
    if constexpr (Math::kPack == 1) {
      if (few_) return add_values_few(w, row, rows, is_first);
    }
    const auto product = is_first ? multiply<Math, false> : multiply<Math, true>;
    product(rows, steps_of<Math>(w.seen.end - w.key) - skip, n_.out_stride / kPanel<Unit>,
            scratch_.p + skip, n_.score_stride / Math::kPack, 1,
            values_.data + (w.panel * kPanel<Unit> / Math::kPack + skip) * values_.stride,
            values_.stride, kPanel<Unit>, out, n_.out_stride);
  }

  void add_values_few(const Window& w, int64_t row, int rows, bool is_first) {
    const Matrix v = problem_.matrix(call_.in.v, chunk_.batch, chunk_.kv_head, sequence_.k_begin);
    const int64_t skip = w.seen.begin - w.key;
    for (int n = 0; n < rows; ++n) {
      Sum* out = scratch_.out + (row + n) * n_.out_stride;
      if (is_first) __builtin_memset(out, 0, static_cast<size_t>(n_.out_stride) * sizeof(Sum));
      add_few<Math>(scratch_.scores + n * n_.score_stride + skip, v, problem_.v_dim, w.seen.begin,
                    w.seen.end - w.seen.begin, hidden_, out);
    }
  }

  // The buffer's scores, of queries i, i + 1, ..., to exponentials; the rows' maximum, total and
  // output follow.
  __attribute__((noinline)) void exponentiate(const ScoreMask<Sum>& mask, const Window& w,
                                              int64_t row, int64_t i, int rows) {
    const Sum factor = mask.remaining_scale() * static_cast<Sum>(kLog2E);
    Sum high[kTileRows];
    for (int n = 0; n < rows; ++n) {
      Sum* s = scratch_.scores + n * n_.score_stride;
      mask.apply(s, w.columns(), i + n, w.key);
      high[n] = maximum(s, w.columns());
    }
    for (int n = 0; n < rows; ++n) {
      prefetcher_.step();
      const Sum* s = scratch_.scores + n * n_.score_stride;
      auto* p = reinterpret_cast<Weight*>(scratch_.p) + n * n_.score_stride;
      const Sum old = scratch_.max[row + n], now = max(old, high[n]);
      if (old != now && old != -kInfinity<Sum>) fade(row + n, exp2(splat((old - now) * factor))[0]);
      scratch_.max[row + n] = now;
      scratch_.total[row + n] +=
          exponentials(s, w.columns(), now == -kInfinity<Sum> ? 0 : now, factor, p);
    }
  }

  static FASTATTN_INLINE Sum maximum(const Sum* s, int64_t columns) {
    Vec<Sum> high = splat(-kInfinity<Sum>), high1 = high;
    for (int64_t j = 0; j < columns; j += kPanel<Unit>) {
      high = vmax(load<Sum>(s + j), high);
      high1 = vmax(load<Sum>(s + j + kLanes<Sum>), high1);
    }
    return reduce_max(vmax(high, high1));
  }

  // p = 2^((s - top) * factor); returns their sum.
  static FASTATTN_INLINE Sum exponentials(const Sum* s, int64_t columns, Sum top, Sum factor,
                                          Weight* p) {
    Vec<Sum> sum{}, sum1{};
    for (int64_t j = 0; j < columns; j += kPanel<Unit>) {
      const Vec<Sum> e = exp2((load<Sum>(s + j) - top) * factor);
      const Vec<Sum> e1 = exp2((load<Sum>(s + j + kLanes<Sum>) - top) * factor);
      sum += e;
      sum1 += e1;
      store(p + j, e);
      store(p + j + kLanes<Sum>, e1);
    }
    return reduce_sum(sum + sum1);
  }

  // Brings what a row has gathered to a higher maximum.
  void fade(int64_t row, Sum by) {
    scratch_.total[row] *= by;
    Sum* out = scratch_.out + row * n_.out_stride;
    for (int64_t d = 0; d < n_.out_stride; d += kLanes<Sum>)
      store(out + d, load<Sum>(out + d) * by);
  }

  __attribute__((noinline)) void drop(const Window& w, int64_t g, int64_t i, int rows) const {
    for (int n = 0; n < rows; ++n)
      drop_row(reinterpret_cast<Weight*>(scratch_.p) + n * n_.score_stride, i + n, w, g);
  }

  template <class T>
  FASTATTN_INLINE void drop_row(T* p, int64_t i, const Window& w, int64_t g) const {
    const auto head = static_cast<uint32_t>(chunk_.batch * problem_.heads + chunk_.head + g);
    const DropoutRow dropout(call_.rules.dropout, static_cast<uint32_t>(i), head);
    for_each_keep<Sum>(dropout, w.key, w.columns(), [&](int64_t j, auto keep) {
      store(p + j, keep ? load<Sum>(p + j) : Vec<Sum>{});
    });
  }

  // What the output and the weights of a row are multiplied with at the end.
  Sum final_factor(int64_t row) const {
    const Sum total = scratch_.total[row];
    return total == 0 ? 0 : keep_scale<Sum>(call_.rules.dropout) / total;
  }

  // Output and log-sum-exp of the chunk's g-th head.
  void finish(const ScoreMask<Sum>& mask, int64_t g) {
    const int64_t h = chunk_.head + g, q_begin = sequence_.q_begin, size = problem_.v_dim;
    const Matrix out = problem_.matrix(call_.out, chunk_.batch, h, q_begin);
    visit_storage<Sum>(out.dtype, [&](auto type) {
      for (int64_t r = 0; r < chunk_.rows; ++r) {
        const int64_t row = g * chunk_.rows + r;
        const Sum factor = final_factor(row);
        const Sum* from = scratch_.out + row * n_.out_stride;
        auto* to = out.at<decltype(type)>(chunk_.first + r);
        const auto result = [&](int64_t d) {
          return scratch_.total[row] == 0 ? Vec<Sum>{} : load<Sum>(from + d) * factor;
        };
        int64_t d = 0;
        for (; d + kLanes<Sum> <= size; d += kLanes<Sum>) store(to + d, result(d));
        if (d < size) store_partial(to + d, result(d), size - d);
      }
    });
    if (!call_.lse) return;
    for (int64_t r = 0; r < chunk_.rows; ++r)
      store_lse(mask, g * chunk_.rows + r, h, q_begin + chunk_.first + r);
  }

  void store_lse(const ScoreMask<Sum>& mask, int64_t row, int64_t h, int64_t q) const {
    const int64_t b = problem_.cu_q == nullptr ? chunk_.batch : 0;
    const int64_t at = b * call_.lse.stride[0] + h * call_.lse.stride[1] + q * call_.lse.stride[2];
    const Sum total = scratch_.total[row];
    const Sum top = scratch_.max[row] * mask.remaining_scale(), log_total = std::log(total);
    const Sum lse = total == 0 ? -kInfinity<Sum> : top + log_total;
    call_.lse.as<Sum>()[at] = lse;
    call_.lse_low.as<Sum>()[at] = total == 0 ? 0 : (top - lse) + log_total;
  }

  // The weights, once the rows' maxima and totals are known: scores of the keys in `seen` once
  // more, a block at a time, and zeros beside them.
  void write_weights(const HiddenKeys& hidden, Span seen) {
    const int64_t k_len = sequence_.k_len;
    visit_storage<Sum>(call_.weights.dtype, [&](auto type) {
      using S = decltype(type);
      for (int64_t g = 0; g < chunk_.heads; ++g) {
        const int64_t head = chunk_.batch * problem_.heads + chunk_.head + g;
        S* to = call_.weights.as<S>() + (head * sequence_.q_len + chunk_.first) * k_len;
        __builtin_memset(to, 0, static_cast<size_t>(chunk_.rows * k_len) * sizeof(S));
      }
      for (int64_t key = seen.begin; key < seen.end; key += n_.block) {
        const Span block{key, min(key + n_.block, seen.end)};
        pack_keys(block, hidden);
        for (int64_t g = 0; g < chunk_.heads; ++g) {
          const ScoreMask<Sum> scores = mask(chunk_.head + g, hidden);
          for (int64_t r = 0; r < chunk_.rows; r += kTileRows)
            write_weights_block(scores, block, g, r,
                                static_cast<int>(min<int64_t>(kTileRows, chunk_.rows - r)), S{});
        }
      }
    });
  }

  template <class S>
  void write_weights_block(const ScoreMask<Sum>& mask, Span block, int64_t g, int64_t r, int rows,
                           S) {
    const int64_t i = chunk_.first + r, row = g * chunk_.rows + r;
    const int64_t head = chunk_.batch * problem_.heads + chunk_.head + g;
    const Window w(mask, block, i, rows);
    if (w.seen.empty()) return;
    multiply_scores(w, g, r, rows);
    for (int n = 0; n < rows; ++n) {
      Sum* s = scratch_.scores + n * n_.score_stride;
      mask.apply(s, w.columns(), i + n, w.key);
      const Sum high = scratch_.max[row + n], top = high == -kInfinity<Sum> ? 0 : high;
      const Sum factor = mask.remaining_scale() * static_cast<Sum>(kLog2E);
      const Sum last = final_factor(row + n);
      for (int64_t j = 0; j < w.columns(); j += kLanes<Sum>)
        store(s + j, exp2((load<Sum>(s + j) - top) * factor) * last);
      if (call_.rules.dropout.p > 0) drop_row(s, i + n, w, g);
      S* to = call_.weights.as<S>() + (head * sequence_.q_len + i + n) * sequence_.k_len + w.key;
      const int64_t count = w.seen.end - w.key;
      int64_t j = 0;
      for (; j + kLanes<Sum> <= count; j += kLanes<Sum>) store(to + j, load<Sum>(s + j));
      if (j < count) store_partial(to + j, load<Sum>(s + j), count - j);
    }
  }

  const AttentionForward& call_;
  const Problem& problem_;
  const ForwardSizes<Math>& n_;
  const int64_t q_stride_;
  const ForwardScratch<Math> scratch_;
  ForwardChunk chunk_{};
  Sequence sequence_{};
  Operand<Unit> values_{};  // of the block
  const uint8_t* hidden_ = nullptr;
  bool few_ = false;
  Prefetcher prefetcher_;
};

}  // namespace fastattn::FASTATTN_ISA
