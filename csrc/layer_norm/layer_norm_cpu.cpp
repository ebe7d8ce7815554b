// One row at a time, on one thread: what it needs is read from memory once, and stays in the
// nearest cache for the passes after the first. In elements moved:
//
//   forward    reads x and residual, writes out and, if kept, sum: 3 or 4 an element
//   backward   reads grad_out and sum, writes grad_x, and grad_residual where dropout tells the
//              two apart: 3 or 4 an element
//
// Bound by memory where the tensors exceed the last cache (then results are written past it), else
// by loads and stores: some 9 vectors of them for 16 columns forward.
//
// Gradients of weight and bias: rows are cut into a number of blocks that doesn't depend on the
// threads; each block adds up its own partial sums, which are then added in order.
#include "layer_norm/layer_norm.h"

#include <cmath>

#include "common/cache.h"
#include "common/parallel.h"
#include "common/row.h"
#include "common/scratch.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class C>
inline constexpr int kVectors = kBlockVectors<C>;

DropoutRow dropout_row(const Dropout& dropout, int64_t row) {
  return {dropout, static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32)};
}

// A parameter as a row of C, or a row of `absent`.
template <class C>
const C* load_parameter(const TensorView& parameter, int64_t n, C absent, C* scratch) {
  if (parameter) return load_row<C>(parameter, 0, parameter.last_stride(), n, scratch);
  for (int64_t j = 0; j < n; ++j) scratch[j] = absent;
  return scratch;
}

int64_t rows_per_piece(int64_t n) {
  return max<int64_t>(kPieceElements / max<int64_t>(n, 1), 1);
}

// Whether to write rows of `result`, one of `tensors` such that the call goes through once, past
// the caches: they could not keep what is written until somebody reads it.
template <class C>
bool streams(const TensorView& result, int64_t rows, int tensors) {
  if (result.dtype != kDTypeOf<C>) return false;
  const int64_t row_bytes = result.last_size() * static_cast<int64_t>(sizeof(C));
  const int64_t last_cache = last_cache_bytes();
  return last_cache > 0 && rows * row_bytes * tensors > last_cache / 2 &&
         row_bytes % kVectorBytes == 0 &&
         reinterpret_cast<uintptr_t>(result.data) % kVectorBytes == 0;
}

template <class C, class S, class R>
struct ForwardScratch {
  S *x, *out;
  R* residual;
  C *sum, *weight, *bias;
  ForwardScratch(Carver& carver, int64_t n)
      : x(carver.take<S>(n)),
        out(carver.take<S>(n)),
        residual(carver.take<R>(n)),
        sum(carver.take<C>(n)),
        weight(carver.take<C>(n)),
        bias(carver.take<C>(n)) {}
};

// sum = residual + dropout(x), and returns the sum of that.
template <class C, bool kDrop, bool kAdd, class S, class R>
C add_row(const S* x, const R* residual, const DropoutRow& numbers, C scale, int64_t n, C* sum) {
  Vec<C> totals[kVectors<C>] = {};
  for_each_block<C>(n, [&](int64_t j, auto block) {
    Vec<Int<C>> keep[kVectors<C>];
    if constexpr (kDrop) numbers.keep(j, keep);
    for (int i = 0; i < kVectors<C>; ++i) {
      Vec<C> s = block.load(x + j, i);
      if constexpr (kDrop) s = keep[i] ? s * scale : Vec<C>{};
      if constexpr (kAdd) s += block.load(residual + j, i);
      block.store(sum + j, i, s);
      totals[i] += s;
    }
  });
  return sum_of_block<C>(totals);
}

template <class C>
struct Moments {
  C mean, variance;
};

// The moments about `guess`, a mean that the adding up has rounded, corrected for the deviations'
// own mean. Fetches the start of the rows that come next meanwhile.
template <class C, class S, class R>
Moments<C> moments(const C* sum, C guess, int64_t n, const S* next_x, const R* next_residual) {
  Vec<C> deviations[kVectors<C>] = {}, squares[kVectors<C>] = {};
  for_each_block<C>(n, [&](int64_t j, auto block) {
    __builtin_prefetch(next_x + j);
    __builtin_prefetch(next_residual + j);
    if constexpr (sizeof(S) >= 4) __builtin_prefetch(next_x + j + kLanes<C>);
    if constexpr (sizeof(R) >= 4) __builtin_prefetch(next_residual + j + kLanes<C>);
    for (int i = 0; i < kVectors<C>; ++i) {
      const Vec<C> d = block.load(sum + j, i, guess) - guess;
      deviations[i] += d;
      squares[i] += d * d;
    }
  });
  const C shift = sum_of_block<C>(deviations) / static_cast<C>(n);
  return {guess + shift, sum_of_block<C>(squares) / static_cast<C>(n) - shift * shift};
}

// With kKeep, sum also goes to `kept`, past the caches.
template <bool kStream, bool kKeep, class C, class S>
void normalise(const C* sum, C mean, C rstd, const C* weight, const C* bias, int64_t n, S* out,
               C* kept) {
  for_each_block<C>(n, [&](int64_t j, auto block) {
    for (int i = 0; i < kVectors<C>; ++i) {
      const Vec<C> s = block.load(sum + j, i);
      if constexpr (kKeep) block.template store<true>(kept + j, i, s);
      const Vec<C> xhat = (s - mean) * rstd;
      const Vec<C> y = xhat * block.load(weight + j, i) + block.load(bias + j, i);
      block.template store<kStream>(out + j, i, y);
    }
  });
}

// C computes; S is x's and out's type, R the residual's, or C where those are brought to it first.
template <class C, class S, class R, bool kDrop, bool kAdd>
void forward_rows(const LayerNormForward& p, const Rows& x_rows, const Rows& residual_rows,
                  bool stream, bool stream_sum, int64_t begin, int64_t end) {
  const int64_t n = p.x.last_size();
  const auto scratch = carve_scratch<ForwardScratch<C, S, R>>(n);
  const C* weight = load_parameter<C>(p.weight, n, 1, scratch.weight);
  const C* bias = load_parameter<C>(p.bias, n, 0, scratch.bias);
  const C scale = keep_scale<C>(p.dropout);
  for (int64_t row = begin; row < end; ++row) {
    const S* x = load_row<S>(p.x, x_rows, row, scratch.x);
    const R* residual = scratch.residual;
    if constexpr (kAdd) residual = load_row<R>(p.residual, residual_rows, row, scratch.residual);
    C* kept = p.sum ? row_buffer<C>(p.sum, row, scratch.sum) : scratch.sum;
    C* sum = stream_sum ? scratch.sum : kept;
    const DropoutRow numbers = dropout_row(p.dropout, row);
    const C total = add_row<C, kDrop, kAdd>(x, residual, numbers, scale, n, sum);
    const auto [mean, variance] = moments(sum, total / static_cast<C>(n), n, x + n, residual + n);
    const C rstd = 1 / std::sqrt(variance + static_cast<C>(p.eps));
    S* out = row_buffer<S>(p.out, row, scratch.out);
    const auto write = stream_sum ? normalise<true, true, C, S>
                       : stream   ? normalise<true, false, C, S>
                                  : normalise<false, false, C, S>;
    write(sum, mean, rstd, weight, bias, n, out, kept);
    store_row(out, p.out, row);
    if (p.sum) store_row(sum, p.sum, row);
    p.mean.as<C>()[row] = mean;
    p.rstd.as<C>()[row] = rstd;
  }
  if (stream) finish_streaming();
}

template <class C, class S, class R>
void forward(const LayerNormForward& p) {
  const Rows x_rows(p.x), residual_rows(p.residual ? p.residual : p.x);
  const int64_t rows = x_rows.count(), n = p.x.last_size();
  const int tensors = 2 + bool(p.residual) + bool(p.sum);
  const bool stream = streams<C>(p.out, rows, tensors);
  const bool stream_sum = stream && p.sum && streams<C>(p.sum, rows, tensors);
  const auto run = [&](auto drops, auto adds) {
    parallel_for_ranges(rows, rows_per_piece(n), p.threads, [&](int64_t begin, int64_t end) {
      forward_rows<C, S, R, drops, adds>(p, x_rows, residual_rows, stream, stream_sum, begin, end);
    });
  };
  constexpr std::true_type yes{};
  constexpr std::false_type no{};
  if constexpr (std::is_same_v<C, R>) {
    if (!p.residual) return p.dropout.p > 0 ? run(yes, no) : run(no, no);
  }
  p.dropout.p > 0 ? run(yes, yes) : run(no, yes);
}

template <class C, class S, class T>
struct BackwardScratch {
  S *grad, *grad_x;
  T *sum, *grad_sum, *grad_residual;
  C* weight;
  BackwardScratch(Carver& carver, int64_t n)
      : grad(carver.take<S>(n)),
        grad_x(carver.take<S>(n)),
        sum(carver.take<T>(n)),
        grad_sum(carver.take<T>(n)),
        grad_residual(carver.take<T>(n)),
        weight(carver.take<C>(n)) {}
};

template <class C>
struct Projections {
  C grad, grad_xhat;  // means of g and of g xhat over the row
};

// Adds grad xhat and grad to the parameters' partial sums if there are any.
template <class C, bool kParameters, class S, class T>
Projections<C> project(const S* grad, const T* sum, C mean, C rstd, const C* weight, int64_t n,
                       C* partial_weight, C* partial_bias) {
  Vec<C> plain[kVectors<C>] = {}, projected[kVectors<C>] = {};
  for_each_block<C>(n, [&](int64_t j, auto block) {
    for (int i = 0; i < kVectors<C>; ++i) {
      const Vec<C> dout = block.load(grad + j, i);
      const Vec<C> xhat = (block.load(sum + j, i) - mean) * rstd;
      if constexpr (kParameters) {
        block.store(partial_weight + j, i, block.load(partial_weight + j, i) + dout * xhat);
        block.store(partial_bias + j, i, block.load(partial_bias + j, i) + dout);
      }
      const Vec<C> g = rounded(dout * block.load(weight + j, i));
      plain[i] += g;
      projected[i] += g * xhat;
    }
  });
  return {sum_of_block<C>(plain) / static_cast<C>(n),
          sum_of_block<C>(projected) / static_cast<C>(n)};
}

// ds of one row into grad_residual, and its dropped image into grad_x; either may be null.
template <bool kDrop, bool kStream, class C, class S, class T>
void input_gradients(const S* grad, const T* sum, C mean, C rstd, const C* weight,
                     const T* grad_sum, Projections<C> means, const DropoutRow& numbers, C scale,
                     int64_t n, S* grad_x, T* grad_residual) {
  for_each_block<C>(n, [&](int64_t j, auto block) {
    Vec<Int<C>> keep[kVectors<C>];
    if constexpr (kDrop) numbers.keep(j, keep);
    for (int i = 0; i < kVectors<C>; ++i) {
      const Vec<C> g = rounded(block.load(grad + j, i) * block.load(weight + j, i));
      const Vec<C> xhat = (block.load(sum + j, i) - mean) * rstd;
      Vec<C> ds = (g - means.grad - xhat * means.grad_xhat) * rstd;
      if (grad_sum != nullptr) ds += block.load(grad_sum + j, i);
      if (grad_residual != nullptr) block.template store<kStream>(grad_residual + j, i, ds);
      if constexpr (kDrop) ds = keep[i] ? ds * scale : Vec<C>{};
      if (grad_x != nullptr) block.template store<kStream>(grad_x + j, i, ds);
    }
  });
}

struct BackwardRows {
  Rows grad, grad_sum, sum;
  bool stream;
};

// Rows [begin, end). C computes; S is grad_out's and grad_x's type, T that of the sum, its gradient
// and grad_residual, or C where those are brought to it first. The partial sums of the parameters'
// gradients go to `partial` [2, N].
template <class C, class S, class T, bool kDrop, bool kParameters>
void backward_rows(const LayerNormBackward& p, const BackwardRows& rows, int64_t begin, int64_t end,
                   C* partial) {
  const int64_t n = p.sum.last_size();
  const auto scratch = carve_scratch<BackwardScratch<C, S, T>>(n);
  const C* weight = load_parameter<C>(p.weight, n, 1, scratch.weight);
  const C scale = keep_scale<C>(p.dropout);
  if constexpr (kParameters) __builtin_memset(partial, 0, static_cast<size_t>(2 * n) * sizeof(C));
  for (int64_t row = begin; row < end; ++row) {
    const S* grad = load_row<S>(p.grad_out, rows.grad, row, scratch.grad);
    const T* sum = load_row<T>(p.sum, rows.sum, row, scratch.sum);
    const C mean = p.mean.as<C>()[row], rstd = p.rstd.as<C>()[row];
    const auto means =
        project<C, kParameters>(grad, sum, mean, rstd, weight, n, partial, partial + n);
    if (!p.grad_x && !p.grad_residual) continue;
    const T* grad_sum = nullptr;
    if (p.grad_sum) grad_sum = load_row<T>(p.grad_sum, rows.grad_sum, row, scratch.grad_sum);
    S* grad_x = p.grad_x ? row_buffer<S>(p.grad_x, row, scratch.grad_x) : nullptr;
    T* grad_residual =
        p.grad_residual ? row_buffer<T>(p.grad_residual, row, scratch.grad_residual) : nullptr;
    const auto run = rows.stream ? input_gradients<kDrop, true, C, S, T>
                                 : input_gradients<kDrop, false, C, S, T>;
    run(grad, sum, mean, rstd, weight, grad_sum, means, dropout_row(p.dropout, row), scale, n,
        grad_x, grad_residual);
    if (p.grad_x) store_row(grad_x, p.grad_x, row);
    if (p.grad_residual) store_row(grad_residual, p.grad_residual, row);
  }
  if (rows.stream) finish_streaming();
}

// A parameter's gradient: the blocks' partial sums, those of `which` (0 weight, 1 bias), in order.
template <class C>
void add_partials(const TensorView& partial, int which, const TensorView& grad, int threads) {
  if (!grad) return;
  const int64_t blocks = partial.size[0], n = partial.size[2];
  const C* first = partial.as<const C>() + which * n;
  const int64_t grain = max<int64_t>(kPieceElements / blocks, 1);
  parallel_for_ranges(n, grain, threads, [&](int64_t begin, int64_t end) {
    const size_t bytes = static_cast<size_t>(end - begin) * sizeof(C);
    C* total = static_cast<C*>(thread_scratch(bytes));
    __builtin_memcpy(total, first + begin, bytes);
    for (int64_t block = 1; block < blocks; ++block) {
      const C* added = first + block * 2 * n + begin;
      for (int64_t j = 0; j < end - begin; ++j) total[j] += added[j];
    }
    store_elements(total, grad, begin, end - begin);
  });
}

template <class C, class S, class T, bool kDrop>
void backward(const LayerNormBackward& p) {
  BackwardRows rows{Rows(p.grad_out), Rows(p.grad_sum ? p.grad_sum : p.sum), Rows(p.sum), true};
  const int64_t count = rows.sum.count(), n = p.sum.last_size();
  const int tensors = 2 + bool(p.grad_sum) + bool(p.grad_x) + bool(p.grad_residual);
  const auto can_stream = [&](const TensorView& result) {
    return !result || streams<C>(result, count, tensors);
  };
  rows.stream = can_stream(p.grad_x) && can_stream(p.grad_residual);
  if (!p.partial) {
    parallel_for_ranges(count, rows_per_piece(n), p.threads, [&](int64_t begin, int64_t end) {
      backward_rows<C, S, T, kDrop, false>(p, rows, begin, end, nullptr);
    });
    return;
  }
  const int64_t blocks = p.partial.size[0];
  parallel_for_each(blocks, p.threads, [&](int64_t block) {
    backward_rows<C, S, T, kDrop, true>(p, rows, block * count / blocks,
                                        (block + 1) * count / blocks,
                                        p.partial.as<C>() + block * 2 * n);
  });
  add_partials<C>(p.partial, 0, p.grad_weight, p.threads);
  add_partials<C>(p.partial, 1, p.grad_bias, p.threads);
}

// Calls f(C{}, S{}, T{}): C the compute type; S that of `main` and T that of `other`, except that
// other types than C and S for T, and all others where C is double, are brought to C row by row.
template <class F>
void visit_types(DType compute, const TensorView& main, const TensorView& other, const F& f) {
  if (compute == DType::float64) return f(double{}, double{}, double{});
  visit_float(main.dtype, [&](auto type) {
    using S = decltype(type);
    if constexpr (!std::is_same_v<S, double>)
      other.dtype == main.dtype ? f(float{}, S{}, S{}) : f(float{}, S{}, float{});
  });
}

void forward_any(const LayerNormForward& p) {
  visit_types(p.mean.dtype, p.x, p.residual,
              [&](auto c, auto s, auto r) { forward<decltype(c), decltype(s), decltype(r)>(p); });
}

void backward_any(const LayerNormBackward& p) {
  visit_types(p.mean.dtype, p.grad_out, p.sum, [&](auto c, auto s, auto t) {
    using C = decltype(c);
    using S = decltype(s);
    using T = decltype(t);
    p.dropout.p > 0 ? backward<C, S, T, true>(p) : backward<C, S, T, false>(p);
  });
}

}  // namespace

extern const LayerNormKernels layer_norm_kernels = {forward_any, backward_any};

}  // namespace fastattn::FASTATTN_ISA
