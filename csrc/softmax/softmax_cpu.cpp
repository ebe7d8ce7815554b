// One row at a time, on one thread: maximum, exponentials and their sum, division. The row is read
// from memory once and written once (2 * S * sizeof(T) bytes); between the passes it sits in
// cache. Rows whose elements don't lie side by side are first gathered into scratch.
#include "softmax/softmax.h"

#include "common/parallel.h"
#include "common/scratch.h"
#include "common/simd.h"
#include "common/simd_math.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// About this many elements make a piece of work for one thread.
constexpr int64_t kGrain = 16384;

// Where a row's z comes from: scale * x, with a row of a mask applied. C is the compute type.
template <class S>
struct PlainSource {
  using C = Compute<S>;
  const S* x;
  C scale;

  FASTATTN_INLINE Vec<C> load_z(int64_t j) const { return load<C>(x + j) * scale; }
  FASTATTN_INLINE Vec<C> load_z(int64_t j, int64_t n) const {
    return first_lanes<C>(n) ? load_partial<C>(x + j, n) * scale : splat(-kInfinity<C>);
  }
};

template <class S>
struct BoolSource {
  using C = Compute<S>;
  const S* x;
  C scale;
  const bool* keep;

  FASTATTN_INLINE Vec<C> load_z(int64_t j) const { return load_z(j, kLanes<C>); }
  FASTATTN_INLINE Vec<C> load_z(int64_t j, int64_t n) const {
    const auto x_j = n == kLanes<C> ? load<C>(x + j) : load_partial<C>(x + j, n);
    return load_mask<C>(keep + j, 1, n) ? x_j * scale : splat(-kInfinity<C>);
  }
};

template <class S>
struct AddSource {
  using C = Compute<S>;
  const S* x;
  C scale;
  const C* bias;

  FASTATTN_INLINE Vec<C> load_z(int64_t j) const {
    return load<C>(x + j) * scale + load<C>(bias + j);
  }
  FASTATTN_INLINE Vec<C> load_z(int64_t j, int64_t n) const {
    const auto z = load_partial<C>(x + j, n) * scale + load_partial<C>(bias + j, n);
    return first_lanes<C>(n) ? z : splat(-kInfinity<C>);
  }
};

template <class C, class S>
void fill_zero(S* out, int64_t begin, int64_t end) {
  __builtin_memset(out + begin, 0, static_cast<size_t>(end - begin) * sizeof(S));
}

// The maximum of a row is -inf: nothing visible, unless a NaN hides in it.
template <class Source>
bool has_nan(const Source& source, int64_t n) {
  using C = typename Source::C;
  for (int64_t j = 0; j < n; j += kLanes<C>) {
    const Vec<C> z = source.load_z(j, min<int64_t>(n - j, kLanes<C>));
    for (int l = 0; l < kLanes<C>; ++l)
      if (z[l] != z[l]) return true;
  }
  return false;
}

// out[0, n) = softmax of the source's row, out[n, size) = 0. `buffer` holds n elements and may be
// `out` itself. `next` is fetched into cache meanwhile: the row that comes after this one.
template <class Source, class S>
void softmax_row(const Source& source, int64_t n, int64_t size, typename Source::C* buffer, S* out,
                 const S* next) {
  using C = typename Source::C;
  constexpr int w = kLanes<C>;
  const int64_t whole = n / w * w, rest = n - whole;

  Vec<C> largest = splat(-kInfinity<C>), largest1 = largest;
  int64_t j = 0;
  for (; j + 2 * w <= whole; j += 2 * w) {
    largest = vmax(source.load_z(j), largest);
    largest1 = vmax(source.load_z(j + w), largest1);
  }
  for (; j < whole; j += w) largest = vmax(source.load_z(j), largest);
  if (rest > 0) largest = vmax(source.load_z(whole, rest), largest);
  C top = reduce_max(vmax(largest, largest1));
  if (top == -kInfinity<C>) {
    if (!has_nan(source, n)) return fill_zero<C>(out, 0, size);
    top = 0;
  }

  Vec<C> sum{}, sum1{};
  const C log2e = static_cast<C>(kLog2E);
  for (j = 0; j + 2 * w <= whole; j += 2 * w) {
    __builtin_prefetch(next + j);
    __builtin_prefetch(next + j + w);
    const Vec<C> e = exp2((source.load_z(j) - top) * log2e);
    const Vec<C> e1 = exp2((source.load_z(j + w) - top) * log2e);
    sum += e;
    sum1 += e1;
    store(buffer + j, e);
    store(buffer + j + w, e1);
  }
  for (; j < whole; j += w) {
    const Vec<C> e = exp2((source.load_z(j) - top) * log2e);
    sum += e;
    store(buffer + j, e);
  }
  Vec<C> last{};
  if (rest > 0) {
    last = exp2((source.load_z(whole, rest) - top) * log2e);
    sum += last;
  }

  const C inverse = 1 / reduce_sum(sum + sum1);
  for (j = 0; j < whole; j += w) store(out + j, load<C>(buffer + j) * inverse);
  if (rest > 0) store_partial(out + whole, last * inverse, rest);
  fill_zero<C>(out, n, size);
}

// Copies a row of any stride and type to `to`, converted.
template <class C, class S>
const C* gather(const S* from, int64_t stride, int64_t n, C* to) {
  for (int64_t j = 0; j < n; ++j) to[j] = load_scalar<C>(from + j * stride);
  return to;
}

// A mask row as elements of the compute type, side by side: in place if it is that already.
template <class C>
const C* bias_row(const TensorView& mask, int64_t offset, int64_t n, C* scratch) {
  const int64_t stride = mask.last_size() == 1 ? 0 : mask.last_stride();
  const C* row = nullptr;
  visit_float(mask.dtype, [&](auto type) {
    using S = decltype(type);
    const S* from = mask.as<const S>() + offset;
    if constexpr (std::is_same_v<S, C>) {
      row = stride == 1 ? from : gather(from, stride, n, scratch);
    } else if constexpr (kCanLoad<C, S>) {
      row = gather(from, stride, n, scratch);
    }
  });
  return row;
}

const bool* keep_row(const TensorView& mask, int64_t offset, int64_t n, bool* scratch) {
  const int64_t stride = mask.last_size() == 1 ? 0 : mask.last_stride();
  const bool* from = mask.as<const bool>() + offset;
  if (stride == 1) return from;
  for (int64_t j = 0; j < n; ++j) scratch[j] = from[j * stride];
  return scratch;
}

template <class S>
struct ForwardScratch {
  using C = Compute<S>;
  S* x;
  C* exponentials;
  C* bias;
  bool* keep;

  ForwardScratch(Carver& carver, int64_t size)
      : x(carver.take<S>(size)),
        exponentials(carver.take<C>(size)),
        bias(carver.take<C>(size)),
        keep(carver.take<bool>(size)) {}
};

template <class S>
void forward_rows(const SoftmaxForward& p, const Rows& x_rows, const Rows& mask_rows, int64_t begin,
                  int64_t end) {
  using C = Compute<S>;
  const int64_t size = p.x.last_size(), stride = p.x.last_stride();
  const int64_t rows_per_matrix = p.is_causal ? p.x.size[p.x.ndim - 2] : 1;
  const C scale = static_cast<C>(p.scale);
  const auto scratch = carve_scratch<ForwardScratch<S>>(size);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t n = p.is_causal ? min(row % rows_per_matrix + 1, size) : size;
    S* out = p.out.as<S>() + row * size;
    const S* x = p.x.as<const S>() + x_rows.offset(row);
    const S* next = p.x.as<const S>() + x_rows.offset(row + 1 < end ? row + 1 : row);
    if (stride != 1) {
      for (int64_t j = 0; j < n; ++j) scratch.x[j] = x[j * stride];
      x = scratch.x;
    }
    C* buffer;
    if constexpr (std::is_same_v<S, C>) {
      buffer = out;
    } else {
      buffer = scratch.exponentials;
    }

    const auto run = [&](const auto& source) { softmax_row(source, n, size, buffer, out, next); };
    if (!p.mask) {
      run(PlainSource<S>{x, scale});
    } else if (p.mask.dtype == DType::boolean) {
      run(BoolSource<S>{x, scale, keep_row(p.mask, mask_rows.offset(row), n, scratch.keep)});
    } else {
      run(AddSource<S>{x, scale, bias_row<C>(p.mask, mask_rows.offset(row), n, scratch.bias)});
    }
  }
}

template <class S>
void forward(const SoftmaxForward& p) {
  const int64_t size = p.x.last_size();
  const Rows x_rows(p.x), mask_rows(p.mask ? p.mask : p.x, p.x);
  if (x_rows.count() == 0 || size == 0) return;
  parallel_for_ranges(
      x_rows.count(), max<int64_t>(kGrain / size, 1), p.threads,
      [&](int64_t begin, int64_t end) { forward_rows<S>(p, x_rows, mask_rows, begin, end); });
}

template <class S>
void backward_row(const S* grad, int64_t grad_stride, const S* out, int64_t out_stride, S* grad_x,
                  int64_t size, Compute<S> scale) {
  using C = Compute<S>;
  constexpr int w = kLanes<C>;
  const auto load_at = [size](const S* from, int64_t stride, int64_t j) {
    const int64_t n = size - j;
    if (stride == 1 && n >= w) return load<C>(from + j);
    return load_strided<C>(from + j * stride, stride, min<int64_t>(n, w));
  };

  Vec<C> sum{};
  for (int64_t j = 0; j < size; j += w)
    sum += load_at(grad, grad_stride, j) * load_at(out, out_stride, j);
  const C dot = reduce_sum(sum);
  for (int64_t j = 0; j < size; j += w) {
    const Vec<C> g = load_at(grad, grad_stride, j), y = load_at(out, out_stride, j);
    const Vec<C> dx = y * (g - dot) * scale;
    if (size - j >= w) {
      store(grad_x + j, dx);
    } else {
      store_partial(grad_x + j, dx, size - j);
    }
  }
}

template <class S>
void backward(const SoftmaxBackward& p) {
  const int64_t size = p.out.last_size();
  const Rows grad_rows(p.grad_out), out_rows(p.out);
  if (out_rows.count() == 0 || size == 0) return;
  parallel_for_ranges(
      out_rows.count(), max<int64_t>(kGrain / size, 1), p.threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row)
          backward_row(p.grad_out.as<const S>() + grad_rows.offset(row), p.grad_out.last_stride(),
                       p.out.as<const S>() + out_rows.offset(row), p.out.last_stride(),
                       p.grad_x.as<S>() + row * size, size, static_cast<Compute<S>>(p.scale));
      });
}

void forward_any(const SoftmaxForward& p) {
  visit_float(p.x.dtype, [&](auto type) { forward<decltype(type)>(p); });
}

void backward_any(const SoftmaxBackward& p) {
  visit_float(p.out.dtype, [&](auto type) { backward<decltype(type)>(p); });
}

}  // namespace

extern const SoftmaxKernels softmax_kernels = {forward_any, backward_any};

}  // namespace fastattn::FASTATTN_ISA
