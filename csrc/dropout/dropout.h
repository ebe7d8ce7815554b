// Dropout, which is its own backward.
//
//   out_rc = x_rc / (1 - p) if the word of row r and column c keeps it, else 0
//
// The words are those of common/philox.h.
#pragma once

#include "common/isa.h"
#include "common/philox.h"
#include "common/tensor_view.h"

namespace fastattn {

struct DropoutForward {
  TensorView x;    // [..., N] floating, any strides; a row is the last dimension
  TensorView out;  // [..., N] contiguous, x's dtype
  Dropout dropout;
  int threads;
};

struct DropoutKernels {
  void (*forward)(const DropoutForward&);
};

FASTATTN_KERNEL_TABLE(DropoutKernels, dropout_kernels)

}  // namespace fastattn
