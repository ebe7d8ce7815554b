"""LayerNorm(residual + dropout(x)) in plain PyTorch (Ba et al. 2016; Vaswani et al. 2017, 5.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn._philox import keep_scale, rowwise_keep_mask


def why_not(*_: object) -> str | None:
    return None


def fwd(
    x: Tensor,  # [..., N]
    residual: Tensor | None,  # [..., N]
    weight: Tensor | None,  # [N]
    bias: Tensor | None,  # [N]
    rng_state: Tensor | None,
    dropout_p: float,
    eps: float,
    keep_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, sum or empty, mean [rows], rstd [rows]); the biased variance, in two passes."""
    dtype = torch.promote_types(sum_dtype(x, residual), torch.float32)
    total = _wide_sum(x, residual, rng_state, dropout_p)
    kept = total.to(sum_dtype(x, residual))
    mean = total.mean(-1, keepdim=True)
    centred = total - mean
    rstd = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    out = centred * rstd
    if weight is not None:
        out = out * weight.to(dtype)
    if bias is not None:
        out = out + bias.to(dtype)
    if keep_sum:
        kept = kept.clone() if kept is x else kept
    else:
        kept = x.new_empty(0, dtype=kept.dtype)
    return out.to(x.dtype).contiguous(), kept.contiguous(), mean.flatten(), rstd.flatten()


def bwd(
    grad_out: Tensor | None,  # [..., N]
    grad_sum: Tensor | None,  # [..., N]
    sum: Tensor,  # [..., N]: what was normalised
    weight: Tensor | None,
    mean: Tensor,  # [rows]
    rstd: Tensor,  # [rows]
    rng_state: Tensor | None,
    dropout_p: float,
    needs: tuple[bool, bool, bool, bool],  # x, residual, weight, bias
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """With xhat = (sum - mean) rstd and g = grad_out * weight:

    dsum = rstd (g - mean(g) - xhat mean(g xhat)) + grad_sum;  dweight = sum(grad_out xhat);
    dbias = sum(grad_out);  dresidual = dsum;  dx = dsum * keep / (1 - p).
    """
    dtype = mean.dtype
    rows = (*sum.shape[:-1], 1)
    xhat = (sum.to(dtype) - mean.view(rows)) * rstd.view(rows)
    grad = torch.zeros_like(xhat) if grad_out is None else grad_out.to(dtype)
    scaled = grad if weight is None else grad * weight.to(dtype)
    projection = (scaled * xhat).mean(-1, keepdim=True)
    grad_total = rstd.view(rows) * (scaled - scaled.mean(-1, keepdim=True) - xhat * projection)
    if grad_sum is not None:
        grad_total = grad_total + grad_sum.to(dtype)

    grad_x = grad_residual = grad_weight = grad_bias = None
    if needs[0]:
        grad_x = _dropped(grad_total, rng_state, dropout_p).to(x_dtype).contiguous()
    if needs[1] and residual_dtype is not None:
        grad_residual = grad_total.to(residual_dtype).contiguous()
        if grad_residual is grad_x:
            grad_residual = grad_residual.clone()
    if needs[2] and weight is not None:
        grad_weight = _sum_rows(grad * xhat).to(weight.dtype)
    if needs[3] and bias_dtype is not None:
        grad_bias = _sum_rows(grad).to(bias_dtype)
    return grad_x, grad_residual, grad_weight, grad_bias


def sum_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype:
    """The wider of the two; float32 for float16 beside bfloat16."""
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def residual_sum(
    x: Tensor, residual: Tensor | None, rng_state: Tensor | None, dropout_p: float
) -> Tensor:
    """residual + dropout(x), as the forward keeps it."""
    return _wide_sum(x, residual, rng_state, dropout_p).to(sum_dtype(x, residual))


def _wide_sum(
    x: Tensor, residual: Tensor | None, rng_state: Tensor | None, dropout_p: float
) -> Tensor:
    dtype = torch.promote_types(sum_dtype(x, residual), torch.float32)
    total = _dropped(x.to(dtype), rng_state, dropout_p)
    return total if residual is None else total + residual.to(dtype)


def _dropped(x: Tensor, rng_state: Tensor | None, dropout_p: float) -> Tensor:
    if dropout_p == 0:
        return x
    assert rng_state is not None
    keep = rowwise_keep_mask(rng_state, dropout_p, x.shape)
    return torch.where(keep, x * keep_scale(dropout_p), 0.0)


def _sum_rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]).sum(0)
