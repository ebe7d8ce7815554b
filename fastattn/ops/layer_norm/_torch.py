"""LayerNorm of a sum by torch's own LayerNorm, where no dropout and one dtype are asked for."""

from __future__ import annotations

import torch
from torch import Tensor


def why_not(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
    eps: float,
    keep_sum: bool,
) -> str | None:
    if dropout_p > 0:
        return "dropout_p > 0: torch draws another mask than the common Philox"
    if any(t is not None and t.dtype != x.dtype for t in (residual, weight, bias)):
        return "mixed dtypes: torch's LayerNorm takes one"
    if x.dtype in (torch.float16, torch.bfloat16):
        return "half inputs: the sum would be rounded before it is normalised"
    if x.numel() == 0:
        return "an empty tensor: nothing to fuse"
    return None


def fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
    eps: float,
    keep_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x.contiguous() if residual is None else (x + residual).contiguous()
    out, mean, rstd = torch.native_layer_norm(total, [x.shape[-1]], weight, bias, eps)
    kept = x.new_empty(0)
    if keep_sum:
        kept = total.clone() if residual is None else total
    return out, kept, mean.flatten(), rstd.flatten()


def bwd(
    grad_out: Tensor | None,
    grad_sum: Tensor | None,
    sum: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    rng_state: Tensor | None,
    dropout_p: float,
    needs: tuple[bool, bool, bool, bool],
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    grad = torch.zeros_like(sum) if grad_out is None else grad_out.contiguous()
    rows = (*sum.shape[:-1], 1)
    bias = None if bias_dtype is None else sum.new_empty(sum.shape[-1])
    total, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
        grad,
        sum.contiguous(),
        [sum.shape[-1]],
        mean.view(rows),
        rstd.view(rows),
        weight,
        bias,
        [needs[0] or needs[1], needs[2], needs[3]],
    )
    if total is not None and grad_sum is not None:
        total = total + grad_sum
    return (
        total if needs[0] else None,
        (total.clone() if needs[0] else total) if needs[1] else None,
        grad_weight if needs[2] else None,
        grad_bias if needs[3] else None,
    )
