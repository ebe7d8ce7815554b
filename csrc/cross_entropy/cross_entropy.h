// Cross entropy of linear logits, fused with the products before and after it.
//
//   z = hidden weight^T + bias;  lse = log sum_c exp(z_c);  t the target's class, w class weights
//   nll = w_t (lse - z_t);       loss = a nll + b sum_c w_c (lse - z_c)
//   dz_c = factor [(a w_t + b sum w) exp(z_c - lse) - b w_c - a w_t [c = t]]
//   dhidden = dz weight;  dweight = dz^T hidden;  dbias = sum over tokens of dz
//
// C is the compute type: double for double inputs, else float.
#pragma once

#include "common/isa.h"
#include "common/tensor_view.h"

namespace fastattn {

struct CrossEntropyRun {
  TensorView hidden;        // [T, D] floating, any strides
  TensorView weight;        // [V, D] hidden's dtype, any strides
  TensorView bias;          // [V] C, contiguous; or none
  TensorView class_weight;  // [V] C, contiguous; or none
  TensorView target;        // [T] int64, contiguous
  TensorView tokens;        // [n] int64, contiguous: the tokens that count, ascending
  TensorView factor;  // [n] C, contiguous: multiplies the gradients; or none if none is wanted
  double a, b;
  double weight_sum;  // of class_weight

  TensorView loss, nll, lse;  // [T] C, contiguous; written for `tokens` alone
  TensorView grad_hidden;     // [T, D] hidden's dtype, contiguous; written for `tokens`; or none
  TensorView grad_weight;     // [V, D] C, contiguous; or none
  TensorView grad_bias;       // [V] C, contiguous; or none

  // Scratch of C, contiguous. The sizes decide how sums are grouped, so they must not depend on
  // the number of threads.
  TensorView logits;   // [chunk, V]: `chunk`, a multiple of 64, tokens at a time; V is 0 without
                       // gradients
  TensorView packed;   // [2, chunk, D rounded up to 64]
  TensorView partial;  // [groups, chunk, D] if grad_hidden, else [groups, 0]; groups of classes
  TensorView moments;  // [groups + 1, 5, chunk]
  int threads;
};

struct CrossEntropyKernels {
  void (*run)(const CrossEntropyRun&);
};

FASTATTN_KERNEL_TABLE(CrossEntropyKernels, cross_entropy_kernels)

}  // namespace fastattn
