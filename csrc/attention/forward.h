// The forward of attention on one thread, for a chunk of queries of heads that share a key head.
//
// Keys are taken in blocks. A block's keys become panels and its values rows (pack.h); then, for
// every kTileRows queries: scores of the whole block into a buffer that stays in cache, masks,
// maximum, exponentials, and the product with the values added to the output so far, which is
// brought to the new maximum first (online softmax, Milakov and Gimelshein 2018). The product with
// the last block goes, divided by the total, straight to where the output lies. Causal, window and
// padding cut the blocks, and the panels of a block, that nobody sees.
//
// Bound by the multiply-add units, 4 * D operations per query and key; at D = 64 the exponentials
// add about 4%, dropout's random numbers 4%, packing 2%.
#pragma once

#include "attention/masking.h"
#include "attention/pack.h"
#include "attention/prefetch.h"
#include "attention/problem.h"
#include "attention/softmax_rows.h"
#include "common/scratch.h"

namespace fastattn::FASTATTN_ISA {

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
  using Window = KeyWindow<Unit>;

 public:
  ForwardTask(const AttentionForward& call, const Problem& problem, const ForwardSizes<Math>& sizes)
      : call_(call),
        problem_(problem),
        n_(sizes),
        q_stride_(round_up(sizes.steps, kLanes<Unit>)),
        writes_through_(call.out.dtype == kDTypeOf<Sum> && problem.v_dim == sizes.out_stride),
        scratch_(carve_scratch<ForwardScratch<Math>>(sizes)) {}

  // `next` is a guess at the chunk that this thread takes next.
  void run(const ForwardChunk& chunk, const ForwardChunk& next) {
    chunk_ = chunk;
    sequence_ = problem_.sequence(chunk.batch);
    prefetch(next);
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
        for_each_tile([&](int64_t r, int rows) { add_block(scores, block, g, r, rows); });
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

  Matrix out_matrix(int64_t g) const {
    return problem_.matrix(call_.out, chunk_.batch, chunk_.head + g, sequence_.q_begin);
  }

  // f(first row, rows) for every kTileRows rows of the chunk.
  template <class F>
  FASTATTN_INLINE void for_each_tile(const F& f) const {
    for (int64_t r = 0; r < chunk_.rows; r += kTileRows)
      f(r, static_cast<int>(min<int64_t>(kTileRows, chunk_.rows - r)));
  }

  void prefetch(const ForwardChunk& next) {
    const int64_t b = next.batch;
    const Sequence s = problem_.sequence(b);
    prefetcher_.begin(chunk_.heads * chunk_.rows);
    if (s.k_len > n_.block || next.rows <= 0) return;
    prefetcher_.add(problem_.matrix(call_.in.q, b, next.head, s.q_begin), next.first, next.rows,
                    problem_.qk_dim);
    if (b == chunk_.batch && next.kv_head == chunk_.kv_head) return;
    prefetcher_.add(problem_.matrix(call_.in.k, b, next.kv_head, s.k_begin), 0, s.k_len,
                    problem_.qk_dim);
    prefetcher_.add(problem_.matrix(call_.in.v, b, next.kv_head, s.k_begin), 0, s.k_len,
                    problem_.v_dim);
  }

  void begin_rows() {
    if (!is_operand<Math>(q_matrix(0), problem_.qk_dim)) {
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
    if (is_operand<Math>(q, problem_.qk_dim)) return as_operand<Math>(q, chunk_.first + r);
    return {scratch_.q + (g * chunk_.rows + r) * q_stride_, q_stride_};
  }

  void pack_keys(Span block, const HiddenKeys& hidden) {
    const Matrix k = problem_.matrix(call_.in.k, chunk_.batch, chunk_.kv_head, sequence_.k_begin);
    pack_panels<Math>(k, block.begin, block.end - block.begin, problem_.qk_dim, hidden.hidden,
                      scratch_.k);
  }

  // Values are read where they are if they lie in one piece that fills whole panels.
  void pack_values(Span block, const HiddenKeys& hidden) {
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

  void multiply_scores(const Window& w, int64_t g, int64_t r, int rows) {
    const Operand<Unit> q = queries(g, r);
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
    exponentiate(mask, w, g, r, rows);

    const Span all = mask.keys(i, i + rows - 1);
    Target<Sum> out =
        sum_in(scratch_.out + row * n_.out_stride, n_.out_stride, all.begin >= block.begin);
    Sum factors[kTileRows];
    if (writes_through_ && all.end <= block.end) {
      for (int n = 0; n < rows; ++n) factors[n] = last_factor(row + n);
      const Matrix to = out_matrix(g);
      out.to = to.at<Sum>(i);
      out.to_stride = to.row_stride;
      out.factors = factors;
    }
    const int64_t skip = (w.seen.begin - w.key) / Math::kPack;
    multiply<Math>(rows, steps_of<Math>(w.seen.end - w.key) - skip, n_.out_stride / kPanel<Unit>,
                   scratch_.p + skip, n_.score_stride / Math::kPack, 1,
                   values_.data + (w.panel * kPanel<Unit> / Math::kPack + skip) * values_.stride,
                   values_.stride, kPanel<Unit>, out);
  }

  // The buffer's scores, of rows r, r + 1, ... of the g-th head, to exponentials; the rows'
  // maximum, total and output follow.
  __attribute__((noinline)) void exponentiate(const ScoreMask<Sum>& mask, const Window& w,
                                              int64_t g, int64_t r, int rows) {
    const int64_t row = g * chunk_.rows + r, i = chunk_.first + r;
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
      const Sum top = now == -kInfinity<Sum> ? 0 : now;
      scratch_.total[row + n] +=
          call_.rules.dropout.p > 0
              ? exponentials(s, w.columns(), top, factor, p, dropout(g, i + n), w.key)
              : exponentials(s, w.columns(), top, factor, p);
    }
  }

  // Brings what a row has gathered to a higher maximum.
  void fade(int64_t row, Sum by) {
    scratch_.total[row] *= by;
    Sum* out = scratch_.out + row * n_.out_stride;
    for (int64_t d = 0; d < n_.out_stride; d += kLanes<Sum>)
      store(out + d, load<Sum>(out + d) * by);
  }

  DropoutRow dropout(int64_t g, int64_t i) const {
    return {call_.rules.dropout, static_cast<uint32_t>(i),
            static_cast<uint32_t>(chunk_.batch * problem_.heads + chunk_.head + g)};
  }

  Sum last_factor(int64_t row) const {
    return final_factor(call_.rules.dropout, scratch_.total[row]);
  }

  // Output, where it isn't there yet, and log-sum-exp of the chunk's g-th head.
  void finish(const ScoreMask<Sum>& mask, int64_t g) {
    const Matrix out = out_matrix(g);
    visit_storage<Sum>(out.dtype, [&](auto type) {
      for_each_tile([&](int64_t r, int rows) {
        const int64_t i = chunk_.first + r;
        const bool is_written = writes_through_ && !mask.keys(i, i + rows - 1).empty();
        for (int64_t n = 0; n < rows; ++n) {
          const int64_t row = g * chunk_.rows + r + n;
          const Sum total = scratch_.total[row];
          if (is_written && total != 0) continue;
          store_output_row(out, i + n, problem_.v_dim, scratch_.out + row * n_.out_stride, total,
                           last_factor(row), type);
        }
      });
    });
    const int64_t b = problem_.cu_q == nullptr ? chunk_.batch : 0;
    for (int64_t r = 0; r < chunk_.rows; ++r) {
      const int64_t row = g * chunk_.rows + r;
      store_log_sum_exp(call_, b, chunk_.head + g, sequence_.q_begin + chunk_.first + r,
                        scratch_.max[row] * mask.remaining_scale(), scratch_.total[row]);
    }
  }

  void write_weights(const HiddenKeys& hidden, Span seen);
  template <class S>
  void write_weights_block(const ScoreMask<Sum>& mask, Span block, int64_t g, int64_t r, int rows,
                           S);

  const AttentionForward& call_;
  const Problem& problem_;
  const ForwardSizes<Math>& n_;
  const int64_t q_stride_;
  const bool writes_through_;  // products may go straight to the output
  const ForwardScratch<Math> scratch_;
  ForwardChunk chunk_{};
  Sequence sequence_{};
  Operand<Unit> values_{};  // of the block
  Prefetcher prefetcher_;
};

}  // namespace fastattn::FASTATTN_ISA
