// LayerNorm of a residual sum with dropout on the branch (Ba et al. 2016; Vaswani et al. 2017,
// section 5.4).
//
//   s = residual + dropout(x);  mean, var over the row (biased);  rstd = 1 / sqrt(var + eps)
//   xhat = (s - mean) rstd;     out = xhat * weight + bias
//
//   g = dout * weight;  ds = rstd (g - mean(g) - xhat mean(g xhat)) + dsum
//   dresidual = ds;  dx = ds * keep / (1 - p);  dweight = sum of dout xhat;  dbias = sum of dout
//
// The compute type is double if x or the residual is, else float.
#pragma once

#include "common/isa.h"
#include "common/philox.h"
#include "common/tensor_view.h"

namespace fastattn {

struct LayerNormForward {
  TensorView x;             // [..., N] floating, any strides
  TensorView residual;      // like x, any floating dtype; or none
  TensorView weight, bias;  // [N] floating; or none
  TensorView out;           // [..., N] contiguous
  TensorView sum;           // [..., N] contiguous: s; or none
  TensorView mean, rstd;    // [rows] contiguous, of the compute type
  Dropout dropout;
  double eps;
  int threads;
};

struct LayerNormBackward {
  TensorView grad_out;       // [..., N] floating, any strides
  TensorView grad_sum;       // like grad_out; or none
  TensorView sum;            // [..., N] floating, any strides: s
  TensorView weight;         // [N] floating; or none
  TensorView mean, rstd;     // as the forward gave them
  TensorView grad_x;         // [..., N] contiguous; or none
  TensorView grad_residual;  // [..., N] contiguous; or none
  TensorView partial;        // [blocks, 2, N] contiguous, of the compute type: scratch for the next
                             // two, whose value depends on `blocks`; none if both are
  TensorView grad_weight, grad_bias;  // [N] contiguous; or none
  Dropout dropout;
  int threads;
};

struct LayerNormKernels {
  void (*forward)(const LayerNormForward&);
  void (*backward)(const LayerNormBackward&);
};

FASTATTN_KERNEL_TABLE(LayerNormKernels, layer_norm_kernels)

}  // namespace fastattn
