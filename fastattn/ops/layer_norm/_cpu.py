"""LayerNorm of a residual sum on the CPU, by the SIMD kernels of csrc/layer_norm."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _native
from fastattn.ops.layer_norm.reference import sum_dtype

_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_MAX_DIMS = 12
_ROWS_PER_BLOCK, _MAX_BLOCKS = 32, 64  # of the parameters' gradients: see csrc/layer_norm


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
    """One sentence why this backend can't run the call, or None if it can."""
    if not x.is_cpu:
        return f"x is on {x.device}, the cpu backend needs it on the CPU"
    if not _native.available():
        return _native.why_not_available()
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in _DTYPES:
            return (
                f"{name} is {tensor.dtype}, the cpu backend takes float32, float64, float16 and "
                "bfloat16"
            )
    if x.dim() > _MAX_DIMS:
        return f"x has {x.dim()} dimensions, the cpu backend takes at most {_MAX_DIMS}"
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
    """(out, sum or empty, mean [rows], rstd [rows]) as the reference."""
    dtype = x.dtype if residual is None else sum_dtype(x, residual)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not keep_sum:
        kept = torch.empty(0, dtype=dtype)
    else:
        kept = torch.empty_like(out, dtype=dtype)
    mean = torch.empty(x.shape[:-1].numel(), dtype=wide)
    rstd = torch.empty_like(mean)
    _native.lib().layer_norm_forward(
        x, residual, weight, bias, rng_state, dropout_p, eps, out, kept if keep_sum else None,
        mean, rstd, torch.get_num_threads(),
    )  # fmt: skip
    return out, kept, mean, rstd


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
    """The gradients of x, residual, weight and bias, None where not needed."""
    if grad_out is None:
        grad_out = mean.new_zeros(()).expand(sum.shape)
    grad_x = grad_residual = partial = grad_weight = grad_bias = None
    size = sum.shape[-1]
    if needs[0]:
        grad_x = torch.empty_like(sum, dtype=x_dtype, memory_format=torch.contiguous_format)
    if needs[1] and residual_dtype is not None:
        grad_residual = torch.empty_like(
            sum, dtype=residual_dtype, memory_format=torch.contiguous_format
        )
    if needs[2] and weight is not None:
        grad_weight = torch.empty(size, dtype=weight.dtype)
    if needs[3] and bias_dtype is not None:
        grad_bias = torch.empty(size, dtype=bias_dtype)
    if grad_weight is not None or grad_bias is not None:
        blocks = min(_MAX_BLOCKS, 1 + mean.shape[0] // _ROWS_PER_BLOCK)
        partial = torch.empty(blocks, 2, size, dtype=mean.dtype)
    _native.lib().layer_norm_backward(
        grad_out, grad_sum, sum, weight, mean, rstd, rng_state, dropout_p, grad_x, grad_residual,
        partial, grad_weight, grad_bias, torch.get_num_threads(),
    )  # fmt: skip
    return grad_x, grad_residual, grad_weight, grad_bias
