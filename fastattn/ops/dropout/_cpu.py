"""Dropout on the CPU, by the SIMD kernel of csrc/dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _native

_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_MAX_DIMS = 12


def why_not(x: Tensor, rng_state: Tensor, p: float) -> str | None:
    """One sentence why this backend can't run the call, or None if it can."""
    if not x.is_cpu:
        return f"x is on {x.device}, the cpu backend needs it on the CPU"
    if not _native.available():
        return _native.why_not_available()
    if x.dtype not in _DTYPES:
        return f"x is {x.dtype}, the cpu backend takes float32, float64, float16 and bfloat16"
    if x.dim() > _MAX_DIMS:
        return f"x has {x.dim()} dimensions, the cpu backend takes at most {_MAX_DIMS}"
    return None


def fwd(x: Tensor, rng_state: Tensor, p: float) -> Tensor:
    """x where kept, times 1 / (1 - p), else 0; contiguous, in x's dtype. Its own backward."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _native.lib().dropout_forward(x, rng_state, p, out, torch.get_num_threads())
    return out
