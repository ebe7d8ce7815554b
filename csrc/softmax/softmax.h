// Softmax over the last dimension, with mask and causal cut.
//
//   z = scale * x + mask,   out_j = exp(z_j - max z) / sum_k exp(z_k - max z)
//   dx_j = scale * out_j * (g_j - sum_k g_k out_k)
//
// A row that sees nothing gives zeros.
#pragma once

#include "common/isa.h"
#include "common/tensor_view.h"

namespace fastattn {

struct SoftmaxForward {
  TensorView x;  // [..., S] floating, any strides
  TensorView
      mask;  // broadcastable to x: bool (true = keep), or float (x's dtype or float32); or none
  TensorView out;  // [..., S] contiguous, x's dtype
  bool is_causal;  // column j is visible to row i (of the last two dimensions) if j <= i
  double scale;
  int threads;
};

struct SoftmaxBackward {
  TensorView grad_out;  // [..., S] out's dtype, any strides
  TensorView out;       // [..., S] as the forward gave it, any strides
  TensorView grad_x;    // [..., S] contiguous, out's dtype
  double scale;
  int threads;
};

struct SoftmaxKernels {
  void (*forward)(const SoftmaxForward&);
  void (*backward)(const SoftmaxBackward&);
};

FASTATTN_KERNEL_TABLE(SoftmaxKernels, softmax_kernels)

}  // namespace fastattn
