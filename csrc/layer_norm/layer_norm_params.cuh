#pragma once

#include "common/dropout_params.cuh"

namespace fa {

// The sum's type: the wider one; float for two halves of different kinds.
template <class X, class R>
struct Wider {
  using type = float;
};
template <class X>
struct Wider<X, X> {
  using type = X;
};

// Tensors are [rows, columns], columns side by side; where no row stride is given, rows as well.
template <class X, class R>
struct LayerNormForwardParams {
  const X* x;
  const R* residual;   // or null
  const void* weight;  // [columns] or null, as bias
  const void* bias;
  X* out;
  typename Wider<X, R>::type* sum;  // or null
  float* mean;                      // [rows]
  float* rstd;                      // [rows]
  DropoutParams dropout;
  int64_t rows;
  int64_t x_row;
  int64_t residual_row;
  int32_t columns;
  int32_t weight_type;  // ElementType
  int32_t bias_type;
  float eps;
};

template <class X, class R>
struct LayerNormBackwardParams {
  const X* grad_out;                           // or null for zeros
  const typename Wider<X, R>::type* grad_sum;  // or null
  const typename Wider<X, R>::type* sum;       // what was normalised
  const void* weight;                          // [columns] or null
  const float* mean;                           // [rows]
  const float* rstd;                           // [rows]
  X* grad_x;                                   // or null
  R* grad_residual;                            // or null
  float* partial;  // [blocks, 2, columns] sums over a block's rows: weight, bias; or null
  DropoutParams dropout;
  int64_t rows;
  int64_t grad_out_row;
  int64_t grad_sum_row;
  int64_t sum_row;
  int32_t columns;
  int32_t weight_type;  // ElementType
};

struct LayerNormParametersParams {
  const float* partial;  // [parts, 2, columns]
  void* grad_weight;     // [columns] or null
  void* grad_bias;       // [columns] or null
  int32_t parts;
  int32_t columns;
  int32_t weight_type;  // ElementType
  int32_t bias_type;
};

}  // namespace fa
