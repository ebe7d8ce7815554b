#include "attention/attention.h"

#include "bindings/module.h"

namespace fastattn {
namespace {

// [T, H, D] as [1, H, T, D]; anything else as it is.
TensorView as_batch_of_one(const TensorView& x) {
  if (!x || x.ndim != 3) return x;
  TensorView view = x;
  view.ndim = 4;
  const int order[] = {1, 0, 2};
  view.size[0] = 1;
  view.stride[0] = 0;
  for (int d = 0; d < 3; ++d) {
    view.size[d + 1] = x.size[order[d]];
    view.stride[d + 1] = x.stride[order[d]];
  }
  return view;
}

// Statistics [H, T] as [1, H, T]; anything else as it is.
TensorView as_statistics(const TensorView& x) {
  if (!x || x.ndim != 2) return x;
  TensorView view = x;
  view.ndim = 3;
  view.size[0] = 1;
  view.stride[0] = 0;
  for (int d = 0; d < 2; ++d) {
    view.size[d + 1] = x.size[d];
    view.stride[d + 1] = x.stride[d];
  }
  return view;
}

AttentionInputs inputs(const TensorView& q, const TensorView& k, const TensorView& v,
                       const TensorView& attn_mask, const TensorView& key_padding_mask,
                       const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k) {
  return {as_batch_of_one(q), as_batch_of_one(k), as_batch_of_one(v), attn_mask,
          key_padding_mask,   cu_seqlens_q,       cu_seqlens_k};
}

AttentionRules rules(double scale, bool is_causal, bool bottom_right, int64_t window_left,
                     int64_t window_right, double dropout_p, const TensorView& rng_state) {
  return {scale,       is_causal,    bottom_right,
          window_left, window_right, read_dropout(rng_state, dropout_p)};
}

}  // namespace

void bind_attention(pybind11::module_& m) {
  m.def(
      "attention_forward",
      [](TensorView q, TensorView k, TensorView v, TensorView attn_mask,
         TensorView key_padding_mask, TensorView cu_seqlens_q, TensorView cu_seqlens_k,
         TensorView rng_state, double scale, bool is_causal, bool bottom_right, int64_t window_left,
         int64_t window_right, double dropout_p, TensorView out, TensorView lse, TensorView lse_low,
         TensorView weights, int threads) {
        const AttentionForward call{
            inputs(q, k, v, attn_mask, key_padding_mask, cu_seqlens_q, cu_seqlens_k),
            rules(scale, is_causal, bottom_right, window_left, window_right, dropout_p, rng_state),
            as_batch_of_one(out),
            as_statistics(lse),
            as_statistics(lse_low),
            weights,
            threads};
        const pybind11::gil_scoped_release unlocked;
        attention_forward_kernels().run(call);
      });
  m.def(
      "attention_backward",
      [](TensorView grad_out, TensorView grad_lse, TensorView grad_weights, TensorView q,
         TensorView k, TensorView v, TensorView attn_mask, TensorView key_padding_mask,
         TensorView cu_seqlens_q, TensorView cu_seqlens_k, TensorView rng_state, double scale,
         bool is_causal, bool bottom_right, int64_t window_left, int64_t window_right,
         double dropout_p, TensorView out, TensorView lse, TensorView lse_low, TensorView grad_q,
         TensorView grad_k, TensorView grad_v, TensorView grad_scores, int threads) {
        const AttentionBackward call{
            inputs(q, k, v, attn_mask, key_padding_mask, cu_seqlens_q, cu_seqlens_k),
            rules(scale, is_causal, bottom_right, window_left, window_right, dropout_p, rng_state),
            as_batch_of_one(out),
            as_statistics(lse),
            as_statistics(lse_low),
            as_batch_of_one(grad_out),
            as_statistics(grad_lse),
            grad_weights,
            as_batch_of_one(grad_q),
            as_batch_of_one(grad_k),
            as_batch_of_one(grad_v),
            grad_scores,
            threads};
        const pybind11::gil_scoped_release unlocked;
        attention_backward_kernels().run(call);
      });
}

}  // namespace fastattn
