"""Softmax by the CUDA C++ kernels of csrc/softmax, which say how."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn._cuda import rows as by_rows
from fastattn._cuda.params import FLOAT, INT32, INT64, POINTER

_MAX_ROWS = 2**31 - 1
_NO_MASK, _BOOL_MASK, _ADDED_MASK = range(3)
_FORWARD_PARAMS = _cuda.Params(
    "softmax/softmax_params.cuh",
    "fa::SoftmaxForwardParams<float>",
    **dict.fromkeys(("x", "mask", "out"), POINTER),
    **dict.fromkeys(("x_row", "mask_batch", "mask_head", "mask_row"), INT64),
    **dict.fromkeys(("rows", "columns", "heads", "length"), INT32),
    **dict.fromkeys(("mask_kind", "mask_type", "mask_spreads", "is_causal"), INT32),
    scale=FLOAT,
)
_BACKWARD_PARAMS = _cuda.Params(
    "softmax/softmax_params.cuh",
    "fa::SoftmaxBackwardParams<float>",
    **dict.fromkeys(("grad_out", "out", "grad_x"), POINTER),
    **dict.fromkeys(("grad_out_row", "out_row"), INT64),
    **dict.fromkeys(("rows", "columns"), INT32),
    scale=FLOAT,
)


def _kernel(direction: str, type_name: str, columns: int) -> _cuda.Kernel:
    source = f"softmax/softmax_{'fwd' if direction == 'forward' else 'bwd'}.cuh"
    return by_rows.team_kernel(source, f"softmax_{direction}", (type_name,), *by_rows.team(columns))


def _default_set(arch: int) -> Iterator[_cuda.Kernel]:
    """Rows of up to 1024."""
    for type_name in by_rows.usual_types(arch):
        yield _kernel("forward", type_name, 1024)
        yield _kernel("backward", type_name, 1024)


_cuda.register_kernels("softmax", _default_set)


def why_not(x: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> str | None:
    """One sentence why this backend can't run the call, or None if it can."""
    return _cuda.why_not_on(x.device) or unsupported(x, mask)


def unsupported(x: Tensor, mask: Tensor | None) -> str | None:
    """What the kernels can't do, on whichever device."""
    if x.numel() // max(1, x.shape[-1]) > _MAX_ROWS:
        return f"x has {x.numel() // x.shape[-1]} rows, the kernels take up to {_MAX_ROWS}"
    return by_rows.unsupported("x", x, None if _is_bool(mask) else mask)


def fwd(x: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """softmax(scale * x + mask), contiguous, in x's dtype; rows that see nothing are 0."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    flat = by_rows.as_rows(x)
    rows, columns = flat.shape
    _, heads, length, _ = (1, 1, 1, *x.shape)[-4:]
    kind = _NO_MASK if mask is None else _BOOL_MASK if _is_bool(mask) else _ADDED_MASK
    spread = None if mask is None else _spread(mask, x)
    *strides, mask_column = (0,) * 4 if spread is None else spread.stride()
    params = _FORWARD_PARAMS.pack(
        flat, spread, out, flat.stride(0), *strides, rows, columns, heads, length, kind,
        by_rows.type_of(spread) if kind == _ADDED_MASK else 0, mask_column != 1, is_causal, scale,
    )  # fmt: skip
    kernel = _kernel("forward", by_rows.TYPES[x.dtype], columns)
    blocks = by_rows.blocks(rows, by_rows.team(columns)[0])
    _cuda.launch(x.device, kernel, (blocks, 1, 1), params)
    return out


def bwd(grad_out: Tensor, out: Tensor, scale: float) -> Tensor:
    """The gradient of x: scale * out * (grad_out - sum(grad_out * out))."""
    grad_x = torch.empty_like(out, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return grad_x
    grad, y = by_rows.as_rows(grad_out, out.dtype), by_rows.as_rows(out)
    rows, columns = y.shape
    strides = grad.stride(0), y.stride(0)
    params = _BACKWARD_PARAMS.pack(grad, y, grad_x, *strides, rows, columns, scale)
    kernel = _kernel("backward", by_rows.TYPES[out.dtype], columns)
    blocks = by_rows.blocks(rows, by_rows.team(columns)[0])
    _cuda.launch(out.device, kernel, (blocks, 1, 1), params)
    return grad_x


def _is_bool(mask: Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.bool


def _spread(mask: Tensor, x: Tensor) -> Tensor:
    """The mask over all of x as four dimensions, the leading ones one; seldom a copy.

    Its columns are side by side, or one for all.
    """
    if mask.dim() and mask.shape[-1] > 1 and mask.stride(-1) > 1:
        for dim, stride in enumerate(mask.stride()):
            mask = mask if stride else mask.narrow(dim, 0, 1)
        mask = mask.contiguous()
    full = mask.expand(x.shape)
    return full[(None,) * (4 - x.dim())] if x.dim() <= 4 else full.reshape(-1, *x.shape[-3:])
