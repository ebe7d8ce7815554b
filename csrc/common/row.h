// Rows for kernels that work row by row: brought to the type and order the kernel wants where they
// don't lie so already, and walked a block of vectors at a time.
#pragma once

#include "common/philox.h"
#include "common/simd.h"
#include "common/tensor_view.h"

namespace fastattn::FASTATTN_ISA {

// About this many elements make a piece of work for one thread.
inline constexpr int64_t kPieceElements = 16384;

// Vectors of C that span the columns of one block of random numbers.
template <class C>
inline constexpr int kBlockVectors = DropoutRow::kColumns / kLanes<C>;

// A block with every column inside the row.
template <class C>
struct WholeBlock {
  template <class S>
  FASTATTN_INLINE Vec<C> load(const S* p, int i, C = 0) const {
    return FASTATTN_ISA::load<C>(p + i * kLanes<C>);
  }
  template <bool kStream = false, class S>
  FASTATTN_INLINE void store(S* p, int i, Vec<C> v) const {
    if constexpr (kStream && sizeof(S) == sizeof(C)) {
      store_streaming(p + i * kLanes<C>, v);
    } else {
      FASTATTN_ISA::store(p + i * kLanes<C>, v);
    }
  }
};

// The last block of a row, of which the first n columns are inside.
template <class C>
struct LastBlock {
  int64_t n;

  FASTATTN_INLINE int64_t lanes(int i) const {
    return min<int64_t>(max<int64_t>(n - i * kLanes<C>, 0), kLanes<C>);
  }
  template <class S>
  FASTATTN_INLINE Vec<C> load(const S* p, int i, C fill = 0) const {
    return load_partial<C>(p + i * kLanes<C>, lanes(i), fill);
  }
  template <bool kStream = false, class S>
  FASTATTN_INLINE void store(S* p, int i, Vec<C> v) const {
    store_partial(p + i * kLanes<C>, v, lanes(i));
  }
};

// f(j, block) for every block of a row of n columns; j is its first column. In f,
// block.load(p + j, i, fill) is vector i < kBlockVectors<C>, with `fill` beyond the row's end, and
// block.store<kStream>(p + j, i, v) writes it, past the caches if asked to.
template <class C, class F>
FASTATTN_INLINE void for_each_block(int64_t n, const F& f) {
  constexpr int64_t step = kBlockVectors<C> * kLanes<C>;
  int64_t j = 0;
  for (; j + step <= n; j += step) f(j, WholeBlock<C>{});
  if (j < n) f(j, LastBlock<C>{n - j});
}

template <class C>
FASTATTN_INLINE C sum_of_block(const Vec<C> (&v)[kBlockVectors<C>]) {
  Vec<C> sum = v[0];
  for (int i = 1; i < kBlockVectors<C>; ++i) sum += v[i];
  return reduce_sum(sum);
}

// n floating elements, `stride` apart, converted to float or double.
template <class C, class S>
void convert(const S* from, int64_t stride, int64_t n, C* to) {
  if constexpr (kCanLoad<C, S> && (sizeof(S) > 2 || std::is_same_v<C, float>)) {
    int64_t j = 0;
    if (stride == 1)
      for (; j + kLanes<C> <= n; j += kLanes<C>) store(to + j, load<C>(from + j));
    for (; j < n; j += kLanes<C>) {
      const int64_t lanes = min<int64_t>(n - j, kLanes<C>);
      store_partial(to + j, load_strided<C>(from + j * stride, stride, lanes), lanes);
    }
  } else {
    for (int64_t j = 0; j < n; ++j)
      to[j] = static_cast<C>(load_scalar<Compute<S>>(from + j * stride));
  }
}

// n elements of a floating tensor, the first at `offset`, `stride` apart, as elements of T side by
// side: where they lie if they are that already, else in `scratch`. T is the tensor's type, or
// float or double.
template <class T>
const T* load_row(const TensorView& view, int64_t offset, int64_t stride, int64_t n, T* scratch) {
  if (view.dtype == kDTypeOf<T>) {
    const T* from = view.as<const T>() + offset;
    if (stride == 1) return from;
    for (int64_t j = 0; j < n; ++j) scratch[j] = from[j * stride];
  } else if constexpr (std::is_same_v<T, Compute<T>>) {
    visit_float(view.dtype, [&](auto type) {
      convert(view.as<const decltype(type)>() + offset, stride, n, scratch);
    });
  }
  return scratch;
}

// A row of the leading dimensions: n = view.last_size().
template <class T>
const T* load_row(const TensorView& view, const Rows& rows, int64_t row, T* scratch) {
  return load_row(view, rows.offset(row), view.last_stride(), view.last_size(), scratch);
}

// n elements of C to a contiguous floating tensor, from element `offset` on.
template <class C>
void store_elements(const C* from, const TensorView& view, int64_t offset, int64_t n) {
  visit_float(view.dtype, [&](auto type) {
    using S = decltype(type);
    S* to = view.as<S>() + offset;
    if constexpr (std::is_same_v<C, float> && !std::is_same_v<S, double>) {
      for_each_block<C>(n, [&](int64_t j, auto block) {
        for (int i = 0; i < kBlockVectors<C>; ++i) block.store(to + j, i, block.load(from + j, i));
      });
    } else if constexpr (sizeof(S) == 2) {
      for (int64_t j = 0; j < n; ++j) store_partial(to + j, splat(static_cast<float>(from[j])), 1);
    } else {
      for (int64_t j = 0; j < n; ++j) to[j] = static_cast<S>(from[j]);
    }
  });
}

// Where to compute row `row` of a contiguous tensor: in place if it holds T, else in `scratch`,
// from which store_row then rounds it. T is the tensor's type, or float or double.
template <class T>
T* row_buffer(const TensorView& view, int64_t row, T* scratch) {
  return view.dtype == kDTypeOf<T> ? view.as<T>() + row * view.last_size() : scratch;
}

template <class T>
void store_row(const T* buffer, const TensorView& view, int64_t row) {
  if constexpr (std::is_same_v<T, Compute<T>>) {
    const int64_t n = view.last_size();
    if (view.dtype != kDTypeOf<T>) store_elements(buffer, view, row * n, n);
  }
}

}  // namespace fastattn::FASTATTN_ISA
