"""LayerNorm of a residual sum by Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _triton
from fastattn._philox import keep_scale
from fastattn._triton import configs
from fastattn.ops.layer_norm.reference import sum_dtype

_MAX_COLUMNS = 65536
_WHOLE_BACKWARD = 8192  # columns whose gradients and partial sums fit a block's registers
_MAX_PARTIALS = 256  # blocks of the backward, each with its own sums over rows: always the same


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
    if x.shape[-1] > _MAX_COLUMNS:
        return f"x has rows of {x.shape[-1]}, the triton backend takes up to {_MAX_COLUMNS}"
    return _triton.why_not("x", x, residual, weight, bias)


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
    from fastattn.ops.layer_norm._triton_kernels import _layer_norm_fwd_kernel

    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dtype = sum_dtype(x, residual)
    kept = x.new_empty(x.shape if keep_sum else 0, dtype=dtype)
    flat = _triton.as_rows(x)
    rows, columns = flat.shape
    other = flat if residual is None else _triton.as_rows(residual)
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    is_whole, config = configs.rows(columns, _triton.arch(x))
    _triton.launch(
        _layer_norm_fwd_kernel, _triton.cdiv(rows, config.block_m), config,
        flat, other, *_parameters(weight, bias, x), out, kept, mean, rstd, rows, columns,
        *flat.stride(), *other.stride(), eps, *_dropout(rng_state, dropout_p, mean),
        HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None, KEEPS_SUM=keep_sum, DROPS=_triton.drops(dropout_p),
        IS_WHOLE=is_whole, ROWS=config.block_m, BLOCK=config.block_n,
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
    total = _triton.as_rows(sum)
    rows, columns = total.shape
    given = {
        "grad": _triton.as_rows(grad_out),
        "grad_sum": None if grad_sum is None else _triton.as_rows(grad_sum),
        "total": total,
        "weight": weight,
        "mean": mean,
        "rstd": rstd,
    }
    empty = {"memory_format": torch.contiguous_format}
    grad_x = torch.empty_like(sum, dtype=x_dtype, **empty) if needs[0] else None
    grad_residual = grad_weight = grad_bias = None
    if needs[1] and residual_dtype is not None:
        grad_residual = torch.empty_like(sum, dtype=residual_dtype, **empty)
    wants = needs[2] and weight is not None, needs[3] and bias_dtype is not None
    partial = _backward_rows(given, grad_x, grad_residual, rng_state, dropout_p, any(wants))
    if partial is None and any(wants):
        partial = _backward_columns(given)
    if wants[0]:
        grad_weight = partial[:, 0].sum(0).to(weight.dtype)
    if wants[1]:
        grad_bias = partial[:, 1].sum(0).to(bias_dtype)
    return grad_x, grad_residual, grad_weight, grad_bias


def _backward_rows(
    given: dict[str, Any],
    grad_x: Tensor | None,
    grad_residual: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
    sums_rows: bool,
) -> Tensor | None:
    """Fills the gradients of x and residual; the parameters' partial sums, where a row fits."""
    from fastattn.ops.layer_norm._triton_kernels import _layer_norm_bwd_kernel

    grad, grad_sum, total, weight, mean, rstd = given.values()
    rows, columns = total.shape
    is_whole, config = configs.rows(columns, _triton.arch(total), most=_WHOLE_BACKWARD)
    programs = min(_MAX_PARTIALS, _triton.cdiv(rows, config.block_m))
    sums_rows = sums_rows and is_whole
    partial = mean.new_empty(programs, 2, columns) if sums_rows else None
    if grad_x is None and grad_residual is None and partial is None:
        return None
    added = total if grad_sum is None else grad_sum
    _triton.launch(
        _layer_norm_bwd_kernel, programs, config,
        grad, added, total, mean if weight is None else weight, mean, rstd,
        *(mean if x is None else x for x in (grad_x, grad_residual, partial)),
        rows, columns, *grad.stride(), *added.stride(), *total.stride(),
        1 if weight is None else weight.stride(0), *_dropout(rng_state, dropout_p, mean),
        HAS_GRAD_SUM=grad_sum is not None, HAS_WEIGHT=weight is not None,
        WANTS_X=grad_x is not None, WANTS_RESIDUAL=grad_residual is not None,
        SUMS_ROWS=sums_rows, DROPS=_triton.drops(dropout_p),
        IS_WHOLE=is_whole, ROWS=config.block_m, BLOCK=config.block_n,
    )  # fmt: skip
    return partial


def _backward_columns(given: dict[str, Any]) -> Tensor:
    """The parameters' partial sums for rows too long for one block's registers."""
    from fastattn.ops.layer_norm._triton_kernels import _layer_norm_sums_kernel

    grad, _, total, _, mean, rstd = given.values()
    rows, columns = total.shape
    config = configs.columns(_triton.arch(total))
    splits = max(1, min(64, _triton.cdiv(rows, config.block_m)))
    partial = mean.new_empty(splits, 2, columns)
    _triton.launch(
        _layer_norm_sums_kernel, splits * _triton.cdiv(columns, config.block_n), config,
        grad, total, mean, rstd, partial, rows, columns, splits, *grad.stride(), *total.stride(),
        ROWS=config.block_m, BLOCK=config.block_n,
    )  # fmt: skip
    return partial


def _parameters(weight: Tensor | None, bias: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous parameters; x stands in for an absent one, which no kernel reads."""
    return tuple(x if p is None else p.contiguous() for p in (weight, bias))


def _dropout(rng_state: Tensor | None, p: float, like: Tensor) -> tuple[Tensor, int, float]:
    if not _triton.drops(p):
        return like, 0, 1.0
    return rng_state, _triton.last_dropped(p), keep_scale(p)
