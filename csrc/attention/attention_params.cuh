// What the attention kernels are told: one struct for all of them, of which each reads its part.
//
// B sequences, Hq and Hk heads of queries and keys, Lq and Lk lengths, Dk and Dv head dimensions.
// Packed sequences (cu_seqlens_q given) lie one after another along the rows: batch strides are 0.
// fastattn/ops/attention/_cuda.py packs the same fields in the same order.
#pragma once

#include "common/dropout_params.cuh"
#include "common/port.cuh"

namespace fa {

// A tensor [batch, heads, rows, columns] of any strides.
template <class E>
struct Tensor4 {
  E* data;              // null: absent
  int64_t batch, head;  // strides in elements; 0 where broadcast
  int32_t row, column;
  int32_t aligned;  // column is 1 and every 4 columns from a multiple of 4 on lie on their own size
  int32_t unused;
};

enum MaskKind : int32_t { kNoMask, kBoolMask, kOwnMask, kFloatMask };  // kOwnMask: of dtype T

template <class T>
struct AttentionParams {
  Tensor4<const T> query, key, value;  // [B, Hq, Lq, Dk], [B, Hk, Lk, Dk], [B, Hk, Lk, Dv]
  Tensor4<T> output;                   // [B, Hq, Lq, Dv]
  Tensor4<const void> attn_mask;       // [B, Hq, Lq, Lk], of mask_kind
  Tensor4<T> weights;                  // [B, Hq, Lq, Lk]
  Tensor4<const T> grad_output;        // as output
  Tensor4<const T> grad_weights;       // as weights
  Tensor4<T> grad_query, grad_key, grad_value;
  Tensor4<float> grad_scores;  // [B, Hq, Lq, Lk], contiguous: dS, from which dmask is summed
  float* lse;                  // [B, Hq, Lq], or [Hq, T] packed; so all statistics
  float* lse_low;              // what rounding took from lse
  float* rows;                 // what the backward keeps of queries: RowStatistics
  const float* grad_lse;       // or null
  const uint8_t* padding;      // [B, Lk], not 0 = hidden; or null
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // [B + 1], or null
  DropoutParams dropout;                       // columns are keys, rows (query, batch * Hq + head)
  int64_t stat_batch, stat_head;               // strides of the statistics
  int64_t padding_batch, padding_key;          // strides of padding
  float scale;                                 // softmax scale; above 0 for kernels without kMask
  int32_t batch, heads, group;                 // B, Hq, Hq / Hk
  int32_t q_len, kv_len;                       // Lq, Lk; the longest where packed
  int32_t key_dim, value_dim;                  // Dk, Dv
  int32_t is_causal, bottom_right, window_left, window_right;  // windows: -1 = unlimited
  int32_t mask_kind;
  int32_t tiles;    // of 64 queries or keys a head, which the grid is made of
  int32_t q_tiles;  // of 64 queries a head
};

}  // namespace fa
