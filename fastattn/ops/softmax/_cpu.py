"""Softmax on the CPU, by the SIMD kernels of csrc/softmax."""

from __future__ import annotations

import torch

from fastattn import _native

_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_MAX_DIMS = 12


def why_not(
    x: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float
) -> str | None:
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


def fwd(x: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float) -> torch.Tensor:
    """softmax(scale * x + mask) over the last dimension; rows that see nothing are 0.

    x is [..., S]; mask broadcasts to it, bool (True = keep) or float. The result is contiguous and
    has x's dtype.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    _native.lib().softmax_forward(x, mask, out, is_causal, scale, torch.get_num_threads())
    return out


def bwd(grad_out: torch.Tensor, out: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of x: scale * out * (grad_out - sum(grad_out * out))."""
    grad_x = torch.empty(out.shape, dtype=out.dtype)
    _native.lib().softmax_backward(grad_out, out, grad_x, scale, torch.get_num_threads())
    return grad_x
