"""Dropout by a Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _triton
from fastattn._philox import keep_scale
from fastattn._triton import configs


def why_not(x: Tensor, rng_state: Tensor, p: float) -> str | None:
    """One sentence why this backend can't run the call, or None if it can."""
    return _triton.why_not("x", x)


def fwd(x: Tensor, rng_state: Tensor, p: float) -> Tensor:
    """x where kept, times 1 / (1 - p), else 0; contiguous, in x's dtype. Its own backward."""
    from fastattn.ops.dropout._triton_kernels import _dropout_fwd_kernel

    if not _triton.drops(p):
        return x.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    flat = _triton.as_rows(x)
    rows, columns = flat.shape
    _, config = configs.rows(columns, _triton.arch(x), most=1024)
    programs = _triton.cdiv(rows, config.block_m) * _triton.cdiv(columns, config.block_n)
    _triton.launch(
        _dropout_fwd_kernel, programs, config, flat, out, rng_state, rows, columns,
        *flat.stride(), _triton.last_dropped(p), keep_scale(p),
        ROWS=config.block_m, BLOCK=config.block_n,
    )  # fmt: skip
    return out
