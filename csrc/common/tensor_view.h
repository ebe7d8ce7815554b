// A tensor as the kernels see it: a pointer, a dtype, sizes and strides (in elements).
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fastattn {

inline constexpr int kMaxDims = 12;

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::none;  // none: the tensor is absent
  int ndim = 0;
  int64_t size[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};

  explicit operator bool() const { return dtype != DType::none; }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  int64_t last_size() const { return ndim == 0 ? 1 : size[ndim - 1]; }
  int64_t last_stride() const { return ndim == 0 ? 1 : stride[ndim - 1]; }
};

// The rows of a tensor: every index of its leading dimensions, in order. `offset(row)` is where
// that row starts, in elements. Neighbouring dimensions that are laid out as one are merged, so a
// contiguous tensor costs one multiplication.
class Rows {
 public:
  // Rows of `view` itself.
  explicit Rows(const TensorView& view) : Rows(view, view) {}

  // Rows of `view` broadcast to the leading sizes of `shape` (dimensions aligned at the right).
  Rows(const TensorView& view, const TensorView& shape) {
    const int missing = shape.ndim - view.ndim;
    for (int d = 0; d + 1 < shape.ndim; ++d) {
      const int64_t size = shape.size[d];
      const bool repeated = d < missing || view.size[d - missing] == 1;
      const int64_t stride = repeated ? 0 : view.stride[d - missing];
      count_ *= size;
      if (size == 1) continue;
      if (ndim_ > 0 && stride_[ndim_ - 1] == stride * size) {
        size_[ndim_ - 1] *= size;
        stride_[ndim_ - 1] = stride;
      } else {
        size_[ndim_] = size;
        stride_[ndim_] = stride;
        ++ndim_;
      }
    }
  }

  int64_t count() const { return count_; }

  int64_t offset(int64_t row) const {
    int64_t offset = 0;
    for (int d = ndim_ - 1; d > 0; --d) {
      offset += row % size_[d] * stride_[d];
      row /= size_[d];
    }
    return ndim_ == 0 ? 0 : offset + row * stride_[0];
  }

 private:
  int ndim_ = 0;
  int64_t count_ = 1;
  int64_t size_[kMaxDims];
  int64_t stride_[kMaxDims];
};

}  // namespace fastattn
