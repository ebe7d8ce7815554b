// The backward of attention on one thread, for the queries of heads that share a key head.
//
// Keys are taken in blocks of kBlockKeys, queries in blocks of kBlockQueries. For every kTileRows
// queries: scores and dO V^T into two lines of a buffer each; from them W and z' (attention.h);
// z' K is added to dQ. Once a block of queries is through, W^T dO and z'^T Q are added to dV and
// dK. P is recomputed from the saved log-sum-exp, dropout from its counters.
//
// 10 * D multiply-adds per query and key (five products). Sums over queries run in strips of
// kStrip that are added up in order, sums over keys in order, so a gradient is the same bit for bit
// whichever part of the work a thread was given.
#pragma once

#include "attention/masking.h"
#include "attention/pack.h"
#include "attention/prefetch.h"
#include "attention/problem.h"
#include "common/scratch.h"
#include "common/simd_math.h"

namespace fastattn::FASTATTN_ISA {

inline constexpr int64_t kBlockKeys = 128;
inline constexpr int64_t kBlockQueries = 128;
inline constexpr int64_t kStrip = 512;
inline constexpr int64_t kPrefetchRows = 128;            // of a matrix; the rest streams by itself
inline constexpr int64_t kLineStride = kBlockKeys + 16;  // lines of a buffer apart in the cache

// What one thread computes: the gradients of keys `keys` if `of_keys`, and those of queries
// `queries` (of every head that reads the key head) if `of_queries`. Sums run over all `queries`
// and all `keys`.
struct BackwardPart {
  int64_t batch, kv_head;
  Span queries, keys;
  bool of_queries, of_keys;
};

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
    hidden = carver.take<uint8_t>(n.k_len);
  }
};

template <class Math>
class BackwardTask {
  using Sum = typename Math::Sum;
  using Window = KeyWindow<Sum>;
  using Rows = Operand<Sum>;

 public:
  BackwardTask(const AttentionBackward& call, const Problem& problem,
               const BackwardSizes<Math>& sizes)
      : call_(call),
        problem_(problem),
        n_(sizes),
        scratch_(carve_scratch<BackwardScratch<Sum>>(sizes)),
        keep_scale_(keep_scale<Sum>(call.rules.dropout)) {}

  // `next` is a guess at the part that this thread takes next.
  void run(const BackwardPart& part, const BackwardPart& next) {
    part_ = part;
    queries_ = part.queries.end - part.queries.begin;
    sequence_ = problem_.sequence(part.batch);
    of_keys_ = part.of_keys && (call_.grad_k || call_.grad_v);
    of_queries_ = part.of_queries && (call_.grad_q || call_.grad_scores);
    if (!of_keys_ && !of_queries_) return;
    prefetch(next);
    begin_rows();
    if (call_.grad_weights) for_each_block(&BackwardTask::add_weights_to_delta);
    for_each_block(&BackwardTask::add_block);
    if (part.of_queries && call_.grad_q) {
      for (int64_t g = 0; g < problem_.group; ++g)
        store_gradient(matrix(call_.grad_q, g, sequence_.q_begin), part.queries.begin, queries_,
                       problem_.qk_dim, scratch_.grad_q + g * queries_ * n_.qk_stride, n_.qk_stride,
                       static_cast<Sum>(call_.rules.scale));
    }
  }

 private:
  // ---- rows of queries ---------------------------------------------------------------------

  int64_t head(int64_t g) const { return part_.kv_head * problem_.group + g; }

  Matrix matrix(const TensorView& x, int64_t g, int64_t first_row) const {
    return problem_.matrix(x, part_.batch, head(g), first_row);
  }

  Matrix keys_matrix(const TensorView& x) const {
    return problem_.matrix(x, part_.batch, part_.kv_head, sequence_.k_begin);
  }

  void begin_rows() {
    const int64_t rows = problem_.group * queries_;
    __builtin_memset(scratch_.grad_q, 0, static_cast<size_t>(rows * n_.qk_stride) * sizeof(Sum));
    for (int64_t g = 0; g < problem_.group; ++g) {
      const Matrix q = matrix(call_.in.q, g, sequence_.q_begin);
      if (!in_place(q, n_.qk_dim, n_.qk_stride))
        pack_rows<Math>(q, part_.queries.begin, queries_, n_.qk_dim, nullptr,
                        scratch_.q + g * queries_ * n_.qk_stride, n_.qk_stride);
      begin_grad_out(g);
      begin_statistics(g);
    }
  }

  // Whether rows can serve as the B of a product as they are: they lie in one piece of whole
  // panels.
  static bool in_place(const Matrix& m, int64_t columns, int64_t stride) {
    return is_operand<Math>(m, columns) && columns == stride && m.row_stride == columns;
  }

  Rows rows(const TensorView& x, const Sum* packed, int64_t g, int64_t r, int64_t columns,
            int64_t stride) const {
    if (x) {
      const Matrix m = matrix(x, g, sequence_.q_begin);
      if (in_place(m, columns, stride)) return as_operand<Math>(m, part_.queries.begin + r);
    }
    return {packed + (g * queries_ + r) * stride, stride};
  }
  Rows q_rows(int64_t g, int64_t r) const {
    return rows(call_.in.q, scratch_.q, g, r, n_.qk_dim, n_.qk_stride);
  }
  Rows grad_out_rows(int64_t g, int64_t r) const {
    return rows(call_.grad_out, scratch_.grad_out, g, r, n_.v_dim, n_.v_stride);
  }

  void begin_grad_out(int64_t g) {
    Sum* packed = scratch_.grad_out + g * queries_ * n_.v_stride;
    if (!call_.grad_out) {
      __builtin_memset(packed, 0, static_cast<size_t>(queries_ * n_.v_stride) * sizeof(Sum));
      return;
    }
    const Matrix m = matrix(call_.grad_out, g, sequence_.q_begin);
    if (!in_place(m, n_.v_dim, n_.v_stride))
      pack_rows<Math>(m, part_.queries.begin, queries_, n_.v_dim, nullptr, packed, n_.v_stride);
  }

  // delta without the share of grad_weights, and the log-sum-exps.
  void begin_statistics(int64_t g) {
    const Matrix out = matrix(call_.out, g, sequence_.q_begin);
    const int64_t b = problem_.cu_q == nullptr ? part_.batch : 0;
    const auto statistic = [&](const TensorView& x, int64_t i) {
      return x.as<const Sum>()[b * x.stride[0] + head(g) * x.stride[1] +
                               (sequence_.q_begin + i) * x.stride[2]];
    };
    visit_storage<Sum>(out.dtype, [&](auto type) {
      using S = decltype(type);
      for (int64_t r = 0; r < queries_; ++r) {
        const int64_t row = g * queries_ + r, i = part_.queries.begin + r;
        scratch_.lse[row] = statistic(call_.lse, i);
        scratch_.lse_low[row] = statistic(call_.lse_low, i);
        const Sum* grad = grad_out_rows(g, r).data;
        Vec<Sum> sum{};
        for (int64_t d = 0; d < n_.v_dim; d += kLanes<Sum>)
          sum += load_units<Math>(out.at<const S>(i), out.column_stride, d, n_.v_dim) *
                 load<Sum>(grad + d);
        scratch_.delta[row] = reduce_sum(sum);
        if (call_.grad_lse) scratch_.delta[row] -= statistic(call_.grad_lse, i);
      }
    });
  }

  void prefetch(const BackwardPart& next) {
    const int64_t steps = min(queries_, kPrefetchRows);
    const auto add = [&](const TensorView& x, const BackwardPart& part, int64_t h, Span rows) {
      if (!x || steps == 0) return;
      const Sequence s = problem_.sequence(part.batch);
      const bool of_queries = h >= 0;
      const Matrix m = problem_.matrix(x, part.batch, of_queries ? h : part.kv_head,
                                       of_queries ? s.q_begin : s.k_begin);
      prefetcher_.add(m, rows.begin, min(rows.end - rows.begin, kPrefetchRows), x.size[3], steps);
    };
    prefetcher_.clear();
    const int64_t next_head = next.kv_head * problem_.group;
    add(call_.in.q, next, next_head, next.queries);
    add(call_.grad_out, next, next_head, next.queries);
    add(call_.out, next, next_head, next.queries);
    add(call_.in.k, next, -1, next.keys);
    add(call_.in.v, next, -1, next.keys);
  }

  // ---- blocks of keys and queries ----------------------------------------------------------

  using Visit = void (BackwardTask::*)(const ScoreMask<Sum>&, Span keys, int64_t g, Span rows);

  // Calls visit for every block of keys, head, and block of the part's rows.
  void for_each_block(Visit visit) {
    const bool sums_keys = visit == &BackwardTask::add_block && of_keys_;
    // Where there is one strip alone, it is the sum.
    const bool strips = problem_.group > 1 || queries_ > kStrip;
    strip_k_ = strips ? scratch_.strip_k : scratch_.grad_k;
    strip_v_ = strips ? scratch_.strip_v : scratch_.grad_v;
    for (int64_t key = part_.keys.begin; key < part_.keys.end; key += kBlockKeys) {
      const Span block{key, min(key + kBlockKeys, part_.keys.end)};
      const int64_t keys = block.end - block.begin;
      bool packed = false;
      if (sums_keys) clear(scratch_.grad_k, scratch_.grad_v, keys);
      for (int64_t g = 0; g < problem_.group; ++g) {
        const HiddenKeys hidden =
            find_hidden_keys(call_.in, sequence_.k_len, part_.batch, head(g), scratch_.hidden);
        const ScoreMask<Sum> mask(call_.in, call_.rules, sequence_, part_.batch, head(g), hidden,
                                  true);
        if (intersect(block, hidden.visible).empty()) continue;
        if (!packed || is_per_head(call_.in.attn_mask)) pack_keys(block, hidden);
        packed = true;
        for (int64_t strip = 0; strip < queries_; strip += kStrip) {
          if (sums_keys && strips) clear(strip_k_, strip_v_, keys);
          const int64_t end = min(strip + kStrip, queries_);
          for (int64_t r = strip; r < end; r += kBlockQueries)
            (this->*visit)(mask, block, g, {r, min(r + kBlockQueries, end)});
          if (sums_keys && strips) add_strip(keys);
        }
      }
      if (sums_keys) store_keys(block);
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
    if (hidden.hidden == nullptr && in_place(k, n_.qk_dim, n_.qk_stride)) {
      keys_ = as_operand<Math>(k, block.begin);
    } else {
      pack_rows<Math>(k, block.begin, keys, n_.qk_dim, hidden.hidden, scratch_.k, n_.qk_stride);
      keys_ = {scratch_.k, n_.qk_stride};
    }
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
    add(scratch_.grad_k, strip_k_, keys * n_.qk_stride);
    add(scratch_.grad_v, strip_v_, keys * n_.v_stride);
  }

  void store_keys(Span block) const {
    const int64_t keys = block.end - block.begin;
    if (call_.grad_k)
      store_gradient(keys_matrix(call_.grad_k), block.begin, keys, n_.qk_dim, scratch_.grad_k,
                     n_.qk_stride, static_cast<Sum>(call_.rules.scale));
    if (call_.grad_v)
      store_gradient(keys_matrix(call_.grad_v), block.begin, keys, n_.v_dim, scratch_.grad_v,
                     n_.v_stride, Sum{1});
  }

  static void store_gradient(const Matrix& to, int64_t first, int64_t rows, int64_t columns,
                             const Sum* from, int64_t stride, Sum factor) {
    visit_storage<Sum>(to.dtype, [&](auto type) {
      for (int64_t i = 0; i < rows; ++i, from += stride) {
        auto* row = to.at<decltype(type)>(first + i);
        int64_t d = 0;
        for (; d + kLanes<Sum> <= columns; d += kLanes<Sum>)
          store(row + d, load<Sum>(from + d) * factor);
        if (d < columns) store_partial(row + d, load<Sum>(from + d) * factor, columns - d);
      }
    });
  }

  // ---- one block ---------------------------------------------------------------------------

  // All gradients from rows `rows` of the part's g-th head and keys `block`.
  void add_block(const ScoreMask<Sum>& mask, Span block, int64_t g, Span rows) {
    Span seen[kBlockQueries / kTileRows + 1];
    int tiles = 0;
    for (int64_t r = rows.begin; r < rows.end; r += kTileRows) {
      const int count = static_cast<int>(min<int64_t>(kTileRows, rows.end - r));
      const Window w(mask, block, part_.queries.begin + r, count);
      seen[tiles++] = w.seen;
      if (w.seen.empty()) continue;
      const int64_t line = r - rows.begin;
      multiply_scores(w, g, r, count, line);
      for (int n = 0; n < count; ++n) {
        prefetcher_.step();
        differentiate(mask, w, g, r + n, line + n);
      }
      if (of_queries_ && call_.grad_q) add_to_grad_q(w, g, r, count, line);
    }
    if (of_keys_) add_to_grad_keys(block, g, rows, seen, tiles);
  }

  // Lines of the buffers: scores of rows r, r + 1, ..., and their dO V^T.
  void multiply_scores(const Window& w, int64_t g, int64_t r, int count, int64_t line) {
    const Rows q = q_rows(g, r), grad_out = grad_out_rows(g, r);
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

  DropoutRow dropout(int64_t g, int64_t i) const {
    return {call_.rules.dropout, static_cast<uint32_t>(i),
            static_cast<uint32_t>(part_.batch * problem_.heads + head(g))};
  }

  // s = P of row r, from its scores.
  FASTATTN_INLINE void probabilities(const ScoreMask<Sum>& mask, const Window& w, int64_t g,
                                     int64_t r, Sum* s) const {
    const int64_t row = g * queries_ + r;
    mask.apply(s, w.columns(), part_.queries.begin + r, w.key);
    const Sum lse = scratch_.lse[row], top = lse == -kInfinity<Sum> ? 0 : lse;
    const Sum low = scratch_.lse_low[row];
    for (int64_t j = 0; j < w.columns(); j += kLanes<Sum>)
      store(s + j, exp2(((load<Sum>(s + j) - top) - low) * static_cast<Sum>(kLog2E)));
  }

  // Scores and dO V^T of a row, in a line of the buffers, to W and z'.
  __attribute__((noinline)) void differentiate(const ScoreMask<Sum>& mask, const Window& w,
                                               int64_t g, int64_t r, int64_t line) {
    Sum* s = line_of(scratch_.weights, line, w.panel);
    Sum* t = line_of(scratch_.grad_scores, line, w.panel);
    const int64_t i = part_.queries.begin + r;
    const Sum delta = scratch_.delta[g * queries_ + r];
    probabilities(mask, w, g, r, s);
    if (call_.grad_weights) add_grad_weights(w, g, i, t);
    if (call_.rules.dropout.p > 0) {
      for_each_keep<Sum>(dropout(g, i), w.key, w.columns(), [&](int64_t j, auto keep) {
        const Vec<Sum> p = load<Sum>(s + j), factor = keep ? splat(keep_scale_) : Vec<Sum>{};
        store(t + j, p * (load<Sum>(t + j) * factor - delta));
        store(s + j, p * factor);
      });
    } else {
      for (int64_t j = 0; j < w.columns(); j += kLanes<Sum>)
        store(t + j, load<Sum>(s + j) * (load<Sum>(t + j) - delta));
    }
    if (call_.grad_scores && of_queries_) store_grad_scores(w, g, i, t);
  }

  void add_to_grad_q(const Window& w, int64_t g, int64_t r, int count, int64_t line) {
    const int64_t skip = w.seen.begin - w.key, key = w.panel * kPanel<Sum> + skip;
    multiply<Math, true>(count, w.seen.end - w.seen.begin, n_.qk_stride / kPanel<Sum>,
                         line_of(scratch_.grad_scores, line, w.panel) + skip, kLineStride, 1,
                         keys_.data + key * keys_.stride, keys_.stride, kPanel<Sum>,
                         scratch_.grad_q + (g * queries_ + r) * n_.qk_stride, n_.qk_stride);
  }

  // dV and dK of a block of keys, a few keys at a time, from those of the rows that see any of
  // them; seen[n] is what the n-th kTileRows of the rows see.
  void add_to_grad_keys(Span block, int64_t g, Span rows, const Span* seen, int tiles) {
    const int64_t keys = block.end - block.begin;
    const auto step = [&](int64_t key) {
      const int64_t left = kPanel<Sum> - key % kPanel<Sum>;
      return min(min<int64_t>(kTileRows, left), keys - key);
    };
    for (int64_t key = 0; key < keys; key += step(key)) {
      const Span these{block.begin + key, block.begin + key + step(key)};
      int first = 0, end = tiles;
      while (first < end && intersect(seen[first], these).empty()) ++first;
      while (first < end && intersect(seen[end - 1], these).empty()) --end;
      if (first == end) continue;
      const int64_t line = first * kTileRows;
      const int64_t lines = min<int64_t>(end * kTileRows, rows.end - rows.begin) - line;
      const Rows q = q_rows(g, rows.begin + line), grad_out = grad_out_rows(g, rows.begin + line);
      const int count = static_cast<int>(these.end - these.begin);
      if (call_.grad_v)
        multiply<Math, true>(count, lines, n_.v_stride / kPanel<Sum>,
                             scratch_.weights + line * kLineStride + key, 1, kLineStride,
                             grad_out.data, grad_out.stride, kPanel<Sum>,
                             strip_v_ + key * n_.v_stride, n_.v_stride);
      if (call_.grad_k)
        multiply<Math, true>(count, lines, n_.qk_stride / kPanel<Sum>,
                             scratch_.grad_scores + line * kLineStride + key, 1, kLineStride,
                             q.data, q.stride, kPanel<Sum>, strip_k_ + key * n_.qk_stride,
                             n_.qk_stride);
    }
  }

  // ---- rarely used -------------------------------------------------------------------------

  // f(j, lanes of dW, how many of them count) for row i of grad_weights, over a window.
  template <class F>
  void for_each_grad_weight(const Window& w, int64_t g, int64_t i, const F& f) const {
    const TensorView& x = call_.grad_weights;
    visit_storage<Sum>(x.dtype, [&](auto type) {
      using S = decltype(type);
      const S* row = x.as<const S>() + part_.batch * x.stride[0] + head(g) * x.stride[1] +
                     i * x.stride[2] + w.key * x.stride[3];
      const int64_t columns = w.seen.end - w.key;
      for (int64_t j = 0; j < columns; j += kLanes<Sum>)
        f(j, load_units<Math>(row, x.stride[3], j, columns));
    });
  }

  void add_grad_weights(const Window& w, int64_t g, int64_t i, Sum* t) const {
    for_each_grad_weight(w, g, i,
                         [&](int64_t j, Vec<Sum> grad) { store(t + j, load<Sum>(t + j) + grad); });
  }

  // delta += sum_j dW_ij W_ij over a block.
  void add_weights_to_delta(const ScoreMask<Sum>& mask, Span block, int64_t g, Span rows) {
    for (int64_t r = rows.begin; r < rows.end; r += kTileRows) {
      const int count = static_cast<int>(min<int64_t>(kTileRows, rows.end - r));
      const Window w(mask, block, part_.queries.begin + r, count);
      if (w.seen.empty()) continue;
      multiply_scores(w, g, r, count, 0);
      for (int n = 0; n < count; ++n) {
        Sum* s = line_of(scratch_.weights, n, w.panel);
        const int64_t i = part_.queries.begin + r + n;
        probabilities(mask, w, g, r + n, s);
        if (call_.rules.dropout.p > 0) {
          for_each_keep<Sum>(dropout(g, i), w.key, w.columns(), [&](int64_t j, auto keep) {
            store(s + j, keep ? load<Sum>(s + j) * keep_scale_ : Vec<Sum>{});
          });
        }
        Vec<Sum> sum{};
        for_each_grad_weight(w, g, i,
                             [&](int64_t j, Vec<Sum> grad) { sum += load<Sum>(s + j) * grad; });
        scratch_.delta[g * queries_ + r + n] += reduce_sum(sum);
      }
    }
  }

  void store_grad_scores(const Window& w, int64_t g, int64_t i, const Sum* t) const {
    const int64_t row = (part_.batch * problem_.heads + head(g)) * sequence_.q_len + i;
    Sum* to = call_.grad_scores.as<Sum>() + row * sequence_.k_len + w.key;
    const int64_t columns = w.seen.end - w.key;
    for (int64_t j = 0; j < columns; j += kLanes<Sum>)
      store_partial(to + j, load<Sum>(t + j), min<int64_t>(columns - j, kLanes<Sum>));
  }

  const AttentionBackward& call_;
  const Problem& problem_;
  const BackwardSizes<Math>& n_;
  const BackwardScratch<Sum> scratch_;
  const Sum keep_scale_;
  BackwardPart part_{};
  Sequence sequence_{};
  int64_t queries_ = 0;
  bool of_keys_ = false, of_queries_ = false;
  Rows keys_{};  // of the block
  Sum *strip_k_ = nullptr, *strip_v_ = nullptr;
  Prefetcher prefetcher_;
};

}  // namespace fastattn::FASTATTN_ISA
