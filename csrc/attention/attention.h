// Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1), forward and backward, over
// padded batches and over packed sequences.
//
//   z_ij = scale * q_i . k_j + mask_ij           (-inf where j is hidden from i)
//   P_ij = exp(z_ij - lse_i),  lse_i = log sum_j exp(z_ij)
//   W_ij = P_ij * keep_ij / (1 - p),  out_i = sum_j W_ij v_j
//
//   dP = (dO V^T + dW) * keep / (1 - p);  delta_i = dO_i . out_i + sum_j dW_ij W_ij - dlse_i
//   z' = P * (dP - delta);  dQ = scale z' K;  dK = scale z'^T Q;  dV = W^T dO;  dmask = sum of z'
//
// Letters: B batch, Hq and Hk heads of queries and keys (Hq a multiple of Hk), Lq and Lk lengths,
// D and E head dimensions of queries and values. A row that sees nothing gives zeros, lse -inf.
#pragma once

#include "common/isa.h"
#include "common/philox.h"
#include "common/tensor_view.h"

namespace fastattn {

// Which keys query i may see: i - left <= j - diagonal <= i + right, and j - diagonal <= i if
// causal, where the diagonal is 0 (top left) or Lk - Lq (bottom right). -1: unlimited.
struct AttentionRules {
  double scale;
  bool is_causal;
  bool bottom_right;
  int64_t window_left;
  int64_t window_right;
  Dropout dropout;
};

// Inputs of both directions. Padded: q [B, Hq, Lq, D], k [B, Hk, Lk, D], v [B, Hk, Lk, E], and
// cu_seqlens absent. Packed: q [1, Hq, Tq, D], k [1, Hk, Tk, D], v [1, Hk, Tk, E], and sequence b
// owns the rows cu_seqlens[b] .. cu_seqlens[b + 1] (int32 [B + 1], contiguous). Any strides.
struct AttentionInputs {
  TensorView q, k, v;
  TensorView attn_mask;         // 4-D, each size 1 or that of [B, Hq, Lq, Lk]: bool (true = may
                                // attend) or float (q's dtype or float32); or none
  TensorView key_padding_mask;  // bool [B, Lk], true = ignored: k and v count as zero; or none
  TensorView cu_seqlens_q, cu_seqlens_k;
};

struct AttentionForward {
  AttentionInputs in;
  AttentionRules rules;
  TensorView out;           // [B, Hq, Lq, E], any strides but the last, which is 1
  TensorView lse, lse_low;  // [B, Hq, Lq] float32 (float64 for float64 inputs): lse rounded, and
                            // what the rounding took away; or none
  TensorView weights;       // [B, Hq, Lq, Lk] contiguous: W; or none
  int threads;
};

struct AttentionBackward {
  AttentionInputs in;
  AttentionRules rules;
  TensorView out, lse, lse_low;                 // as the forward gave them
  TensorView grad_out, grad_lse, grad_weights;  // like out, lse and weights, any strides; or none
  TensorView grad_q, grad_k, grad_v;  // like q, k, v, last stride 1; or none if not needed
  TensorView grad_scores;  // [B, Hq, Lq, Lk] contiguous, of lse's dtype, zeroed: z'; or none
  int threads;
};

struct AttentionForwardKernels {
  void (*run)(const AttentionForward&);
};
struct AttentionBackwardKernels {
  void (*run)(const AttentionBackward&);
};

FASTATTN_KERNEL_TABLE(AttentionForwardKernels, attention_forward_kernels)
FASTATTN_KERNEL_TABLE(AttentionBackwardKernels, attention_backward_kernels)

}  // namespace fastattn
