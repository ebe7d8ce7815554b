// The backward of attention on one thread, for the queries of heads that share a key head.
//
// Keys are taken in blocks of kBlockKeys, queries in blocks of kBlockQueries. For every kTileRows
// queries: scores and dO V^T into two lines of a buffer each; from them W and z'
// (backward_scores.h); z' K is added to dQ. Once a block of queries is through, W^T dO and z'^T Q
// are added to dV and dK. P is recomputed from the saved log-sum-exp, dropout from its counters.
// The last product of a sum goes straight to where the gradient lies, so that its stores hide
// behind the products.
//
// Bound by the multiply-add units, 10 * D operations per query and key (five products). Sums over
// queries run in strips of kStrip that are added up in order, sums over keys in order, so a
// gradient is the same bit for bit whichever part of the work a thread was given.
#pragma once

#include "attention/backward_gradient.h"
#include "attention/backward_rows.h"
#include "attention/backward_scores.h"
#include "attention/backward_sizes.h"
#include "attention/prefetch.h"

namespace fastattn::FASTATTN_ISA {

template <class Math>
class BackwardTask {
  using Sum = typename Math::Sum;
  using Window = KeyWindow<Sum>;

 public:
  BackwardTask(const AttentionBackward& call, const Problem& problem,
               const BackwardSizes<Math>& sizes)
      : call_(call),
        problem_(problem),
        n_(sizes),
        scratch_(carve_scratch<BackwardScratch<Sum>>(sizes)),
        rows_(call, problem, n_, scratch_),
        scores_(call, problem) {}

  // `next` is a guess at the part that this thread takes next.
  void run(const BackwardPart& part, const BackwardPart& next) {
    part_ = part;
    sequence_ = problem_.sequence(part.batch);
    of_keys_ = part.of_keys && (call_.grad_k || call_.grad_v);
    of_queries_ = part.of_queries && (call_.grad_q || call_.grad_scores);
    if (!of_keys_ && !of_queries_) return;
    rows_.begin(part);
    for (int64_t at = 0; at < problem_.group * rows_.count(); ++at)
      scratch_.sums_of_queries[at] = Place::nowhere;
    if (call_.grad_weights) for_each_block(&BackwardTask::add_weights_to_delta);
    prefetch(next);
    for_each_block(&BackwardTask::add_block);
    if (of_queries_ && call_.grad_q) finish_queries();
  }

 private:
  Gradient<Sum> grad_q(int64_t g) const {
    return {rows_.matrix(call_.grad_q, g), scratch_.grad_q, n_.qk_dim, n_.qk_stride,
            scores_.remaining_scale()};
  }
  Gradient<Sum> grad_k(Sum* sums) const {
    return {keys_matrix(call_.grad_k), sums, n_.qk_dim, n_.qk_stride, scores_.remaining_scale()};
  }
  Gradient<Sum> grad_v(Sum* sums) const {
    return {keys_matrix(call_.grad_v), sums, n_.v_dim, n_.v_stride, Sum{1}};
  }

  Matrix keys_matrix(const TensorView& x) const {
    return problem_.matrix(x, part_.batch, part_.kv_head, sequence_.k_begin);
  }

  using Visit = void (BackwardTask::*)(const ScoreMask<Sum>&, Span keys, int64_t g, Span rows,
                                       bool is_last);

  // Calls visit for every block of keys, head, and block of the part's rows. `is_last`: no block of
  // rows follows, of those whose products are added up in one place.
  void for_each_block(Visit visit) {
    const bool sums_keys = visit == &BackwardTask::add_block && of_keys_;
    has_strips_ = problem_.group > 1 || rows_.count() > kStrip;
    for (int64_t key = part_.keys.begin; key < part_.keys.end; key += kBlockKeys) {
      const Span block{key, min(key + kBlockKeys, part_.keys.end)};
      const int64_t keys = block.end - block.begin;
      bool packed = false;
      if (sums_keys) begin_keys(keys);
      prefetch_keys(block);
      for (int64_t g = 0; g < problem_.group; ++g) {
        const HiddenKeys hidden = find_hidden_keys(call_.in, sequence_.k_len, part_.batch,
                                                   rows_.head(g), scratch_.hidden);
        const ScoreMask<Sum> mask(call_.in, call_.rules, sequence_, part_.batch, rows_.head(g),
                                  hidden, false);
        if (intersect(block, hidden.visible).empty()) continue;
        if (!packed || is_per_head(call_.in.attn_mask)) pack_keys(block, hidden);
        packed = true;
        for (int64_t strip = 0; strip < rows_.count(); strip += kStrip) {
          if (sums_keys && has_strips_) clear(scratch_.strip_k, scratch_.strip_v, keys);
          const int64_t end = min(strip + kStrip, rows_.count());
          for (int64_t r = strip; r < end; r += kBlockQueries)
            (this->*visit)(mask, block, g, {r, min(r + kBlockQueries, end)},
                           !has_strips_ && r + kBlockQueries >= end);
          if (sums_keys && has_strips_) add_strip(keys);
        }
      }
      if (sums_keys) finish_keys(block);
    }
  }

  static bool is_per_head(const TensorView& mask) {
    return mask && is_key_mask(mask) && broadcast_stride(mask, 1) != 0;
  }

  void pack_keys(Span block, const HiddenKeys& hidden) {
    const int64_t keys = min(block.end, hidden.visible.end) - block.begin;
    const Matrix k = keys_matrix(call_.in.k), v = keys_matrix(call_.in.v);
    pack_panels<Math>(k, block.begin, keys, n_.qk_dim, hidden.hidden, scratch_.k_panels);
    pack_panels<Math>(v, block.begin, keys, n_.v_dim, hidden.hidden, scratch_.v_panels);
    if (hidden.hidden == nullptr && rows_.in_place(k, n_.qk_dim, n_.qk_stride)) {
      keys_ = as_operand<Math>(k, block.begin);
    } else {
      pack_rows<Math>(k, block.begin, keys, n_.qk_dim, hidden.hidden, scratch_.k, n_.qk_stride);
      keys_ = {scratch_.k, n_.qk_stride};
    }
  }

  void begin_keys(int64_t keys) {
    for (Place& place : sums_of_keys_) place = has_strips_ ? Place::scratch : Place::nowhere;
    if (has_strips_) clear(scratch_.grad_k, scratch_.grad_v, keys);
  }

  void clear(Sum* of_k, Sum* of_v, int64_t keys) const {
    __builtin_memset(of_k, 0, static_cast<size_t>(keys * n_.qk_stride) * sizeof(Sum));
    __builtin_memset(of_v, 0, static_cast<size_t>(keys * n_.v_stride) * sizeof(Sum));
  }

  void add_strip(int64_t keys) {
    const auto add = [](Sum* to, const Sum* from, int64_t count) {
      for (int64_t j = 0; j < count; j += kLanes<Sum>)
        store(to + j, load<Sum>(to + j) + load<Sum>(from + j));
    };
    add(scratch_.grad_k, scratch_.strip_k, keys * n_.qk_stride);
    add(scratch_.grad_v, scratch_.strip_v, keys * n_.v_stride);
  }

  void finish_keys(Span block) const {
    const Gradient<Sum> of_k = grad_k(scratch_.grad_k), of_v = grad_v(scratch_.grad_v);
    for_each_key_tile<Sum>(block.end - block.begin, [&](int64_t key, int count) {
      const Place place = sums_of_keys_[key];
      if (call_.grad_k) of_k.store_rows(key, place, block.begin + key, count);
      if (call_.grad_v) of_v.store_rows(key, place, block.begin + key, count);
    });
  }

  // dV and dK of a block of keys, a few keys at a time, from those of the rows that see any of
  // them; seen[n] is what the n-th kTileRows of the rows see.
  void add_to_grad_keys(Span block, int64_t g, Span rows, const Span* seen, int tiles,
                        bool is_last) {
    const Gradient<Sum> of_k = grad_k(has_strips_ ? scratch_.strip_k : scratch_.grad_k);
    const Gradient<Sum> of_v = grad_v(has_strips_ ? scratch_.strip_v : scratch_.grad_v);
    for_each_key_tile<Sum>(block.end - block.begin, [&](int64_t key, int count) {
      const Span these{block.begin + key, block.begin + key + count};
      int first = 0, end = tiles;
      while (first < end && intersect(seen[first], these).empty()) ++first;
      while (first < end && intersect(seen[end - 1], these).empty()) --end;
      if (first == end) return;
      const int64_t line = first * kTileRows;
      const int64_t lines = min<int64_t>(end * kTileRows, rows.end - rows.begin) - line;
      const Operand<Sum> q = rows_.q(g, rows.begin + line);
      const Operand<Sum> grad_out = rows_.grad_out(g, rows.begin + line);
      Place& place = sums_of_keys_[key];
      if (call_.grad_v)
        multiply<Math>(count, lines, n_.v_stride / kPanel<Sum>,
                       scratch_.weights + line * kLineStride + key, 1, kLineStride, grad_out.data,
                       grad_out.stride, kPanel<Sum>, of_v.target(key, place, is_last, these.begin));
      if (call_.grad_k)
        multiply<Math>(count, lines, n_.qk_stride / kPanel<Sum>,
                       scratch_.grad_scores + line * kLineStride + key, 1, kLineStride, q.data,
                       q.stride, kPanel<Sum>, of_k.target(key, place, is_last, these.begin));
      place = is_last ? Place::there : Place::scratch;
    });
  }

  // All gradients from rows `rows` of the part's g-th head and keys `block`.
  void add_block(const ScoreMask<Sum>& mask, Span block, int64_t g, Span rows, bool is_last) {
    Span seen[kBlockQueries / kTileRows + 1];
    int tiles = 0;
    for_each_tile(rows, [&](int64_t r, int count) {
      const Window w(mask, block, rows_.query(r), count);
      seen[tiles++] = w.seen;
      if (w.seen.empty()) return;
      const int64_t line = r - rows.begin;
      multiply_scores(w, g, r, count, line);
      for (int n = 0; n < count; ++n) {
        prefetcher_.step();
        key_prefetcher_.step();
        scores_.differentiate(mask, w, row(g, r + n), line_of(scratch_.weights, line + n, w.panel),
                              line_of(scratch_.grad_scores, line + n, w.panel), of_queries_);
      }
      if (of_queries_ && call_.grad_q) add_to_grad_q(mask, w, block, g, r, count, line);
    });
    if (of_keys_) add_to_grad_keys(block, g, rows, seen, tiles, is_last);
  }

  typename BackwardScores<Math>::Row row(int64_t g, int64_t r) const {
    const int64_t at = rows_.row(g, r);
    return {part_.batch,      rows_.head(g),        rows_.query(r),
            scratch_.lse[at], scratch_.lse_low[at], scratch_.delta[at]};
  }

  // Lines of the buffers: scores of rows r, r + 1, ..., and their dO V^T.
  void multiply_scores(const Window& w, int64_t g, int64_t r, int count, int64_t line) {
    const Operand<Sum> q = rows_.q(g, r), grad_out = rows_.grad_out(g, r);
    constexpr int panel = kPanel<Sum>;
    multiply_panels<Math>(count, n_.qk_dim, w.panels, q.data, q.stride,
                          scratch_.k_panels + w.panel * panel * n_.qk_dim,
                          line_of(scratch_.weights, line, w.panel), kLineStride);
    multiply_panels<Math>(count, n_.v_dim, w.panels, grad_out.data, grad_out.stride,
                          scratch_.v_panels + w.panel * panel * n_.v_dim,
                          line_of(scratch_.grad_scores, line, w.panel), kLineStride);
  }

  Sum* line_of(Sum* buffer, int64_t line, int64_t panel) const {
    return buffer + line * kLineStride + panel * kPanel<Sum>;
  }

  void add_to_grad_q(const ScoreMask<Sum>& mask, const Window& w, Span block, int64_t g, int64_t r,
                     int count, int64_t line) {
    const int64_t skip = w.seen.begin - w.key, key = w.panel * kPanel<Sum> + skip;
    const int64_t i = rows_.query(r), at = rows_.row(g, r);
    const bool is_last = min(mask.keys(i, i + count - 1).end, part_.keys.end) <= block.end;
    Place& place = scratch_.sums_of_queries[at];
    multiply<Math>(count, w.seen.end - w.seen.begin, n_.qk_stride / kPanel<Sum>,
                   line_of(scratch_.grad_scores, line, w.panel) + skip, kLineStride, 1,
                   keys_.data + key * keys_.stride, keys_.stride, kPanel<Sum>,
                   grad_q(g).target(at, place, is_last, i));
    place = is_last ? Place::there : Place::scratch;
  }

  void finish_queries() const {
    for (int64_t g = 0; g < problem_.group; ++g) {
      const Gradient<Sum> of_q = grad_q(g);
      for (int64_t begin = 0; begin < rows_.count(); begin += kBlockQueries) {
        for_each_tile({begin, min(begin + kBlockQueries, rows_.count())},
                      [&](int64_t r, int count) {
                        const int64_t at = rows_.row(g, r);
                        of_q.store_rows(at, scratch_.sums_of_queries[at], rows_.query(r), count);
                      });
      }
    }
  }

  // delta += sum_j dW_ij W_ij over a block.
  void add_weights_to_delta(const ScoreMask<Sum>& mask, Span block, int64_t g, Span rows, bool) {
    for_each_tile(rows, [&](int64_t r, int count) {
      const Window w(mask, block, rows_.query(r), count);
      if (w.seen.empty()) return;
      multiply_scores(w, g, r, count, 0);
      for (int n = 0; n < count; ++n)
        scratch_.delta[rows_.row(g, r + n)] +=
            scores_.weights_dot_grad(mask, w, row(g, r + n), line_of(scratch_.weights, n, w.panel));
    });
  }

  int64_t meetings(Span keys) const {
    return count_meetings(Diagonal(call_.rules, sequence_), part_.queries, keys) * problem_.group;
  }

  // The rows of the next part, and the keys of its first block.
  void prefetch(const BackwardPart& next) {
    prefetcher_.begin(meetings(part_.keys));
    const Sequence s = problem_.sequence(next.batch);
    const auto add = [&](const TensorView& x, int64_t head, int64_t begin, Span rows,
                         int64_t most) {
      if (x)
        prefetcher_.add(problem_.matrix(x, next.batch, head, begin), rows.begin,
                        min(rows.end - rows.begin, most), x.size[3]);
    };
    const int64_t head = next.kv_head * problem_.group;
    add(call_.in.q, head, s.q_begin, next.queries, kStrip);
    add(call_.grad_out, head, s.q_begin, next.queries, kStrip);
    add(call_.out, head, s.q_begin, next.queries, kStrip);
    add(call_.in.k, next.kv_head, s.k_begin, next.keys, kBlockKeys);
    add(call_.in.v, next.kv_head, s.k_begin, next.keys, kBlockKeys);
  }

  // The keys of the next block.
  void prefetch_keys(Span block) {
    key_prefetcher_.begin(meetings(block));
    const int64_t count = min(kBlockKeys, part_.keys.end - block.end);
    key_prefetcher_.add(keys_matrix(call_.in.k), block.end, count, n_.qk_dim);
    key_prefetcher_.add(keys_matrix(call_.in.v), block.end, count, n_.v_dim);
  }

  const AttentionBackward& call_;
  const Problem& problem_;
  const BackwardSizes<Math>& n_;
  const BackwardScratch<Sum> scratch_;
  BackwardRows<Math> rows_;
  const BackwardScores<Math> scores_;
  BackwardPart part_{};
  Sequence sequence_{};
  bool of_keys_ = false, of_queries_ = false, has_strips_ = false;
  Operand<Sum> keys_{};             // of the block
  Place sums_of_keys_[kBlockKeys];  // of the block, by the first key of a tile
  Prefetcher prefetcher_, key_prefetcher_;
};

}  // namespace fastattn::FASTATTN_ISA
