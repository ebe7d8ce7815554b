"""Softmax by Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _triton
from fastattn._triton import configs

_NO_MASK, _BOOL, _ADDED = range(3)


def why_not(x: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> str | None:
    """One sentence why this backend can't run the call, or None if it can."""
    added = mask if mask is not None and mask.dtype != torch.bool else None
    return _triton.why_not("x", x, added)


def fwd(x: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """softmax(scale * x + mask), contiguous, in x's dtype; rows that see nothing are 0."""
    from fastattn.ops.softmax._triton_kernels import _softmax_fwd_kernel

    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    flat = _triton.as_rows(x)
    rows, columns = flat.shape
    is_whole, config = configs.rows(columns, _triton.arch(x))
    kind = _NO_MASK if mask is None else _BOOL if mask.dtype == torch.bool else _ADDED
    lengths = (1, 1, 1, *x.shape)[-4:]
    spread = x if mask is None else _spread(mask, x)
    _triton.launch(
        _softmax_fwd_kernel, _triton.cdiv(rows, config.block_m), config,
        flat, spread, out, rows, columns, *flat.stride(), lengths[1], lengths[2],
        *(spread.stride() if kind else (0, 0, 0, 0)), scale,
        MASK=kind, IS_CAUSAL=is_causal, IS_WHOLE=is_whole,
        ROWS=config.block_m, BLOCK=config.block_n,
    )  # fmt: skip
    return out


def bwd(grad_out: Tensor, out: Tensor, scale: float) -> Tensor:
    """The gradient of x: scale * out * (grad_out - sum(grad_out * out))."""
    from fastattn.ops.softmax._triton_kernels import _softmax_bwd_kernel

    grad_x = torch.empty_like(out, memory_format=torch.contiguous_format)
    grad, y = _triton.as_rows(grad_out), _triton.as_rows(out)
    rows, columns = y.shape
    is_whole, config = configs.rows(columns, _triton.arch(out))
    _triton.launch(
        _softmax_bwd_kernel, _triton.cdiv(rows, config.block_m), config,
        grad, y, grad_x, rows, columns, *grad.stride(), *y.stride(), scale,
        IS_WHOLE=is_whole, ROWS=config.block_m, BLOCK=config.block_n,
    )  # fmt: skip
    return grad_x


def _spread(mask: Tensor, x: Tensor) -> Tensor:
    """The mask's bytes or numbers over all of x, as four dimensions, the leading ones one."""
    full = _triton.as_bytes(mask).expand(x.shape)
    if x.dim() <= 4:
        return full[(None,) * (4 - x.dim())]
    return full.reshape(-1, *x.shape[-3:])
