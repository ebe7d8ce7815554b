#pragma once

#include "common/port.cuh"

namespace fa {

enum MaskKind : int32_t { kNoMask, kBoolMask, kAddedMask };

// Tensors are [rows, columns], columns side by side; where no row stride is given, rows as well.
template <class T>
struct SoftmaxForwardParams {
  const T* x;
  const void* mask;  // [batch, heads, length, columns or 1], rows in this order; or null
  T* out;
  int64_t x_row;
  int64_t mask_batch;
  int64_t mask_head;
  int64_t mask_row;
  int32_t rows;
  int32_t columns;
  int32_t heads;
  int32_t length;
  int32_t mask_kind;     // MaskKind
  int32_t mask_type;     // ElementType of an added mask
  int32_t mask_spreads;  // its one column to all
  int32_t is_causal;     // row i of `length` sees columns up to i
  float scale;
};

template <class T>
struct SoftmaxBackwardParams {
  const T* grad_out;
  const T* out;
  T* grad_x;
  int64_t grad_out_row;
  int64_t out_row;
  int32_t rows;
  int32_t columns;
  float scale;
};

}  // namespace fa
