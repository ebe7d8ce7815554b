"""The CUDA kernels of softmax on emulated threads, for tests."""

from __future__ import annotations

from torch import Tensor

from fastattn._cuda import emulator
from fastattn.ops.softmax._cuda import bwd, fwd, unsupported

__all__ = ["bwd", "fwd", "why_not"]


def why_not(x: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> str | None:
    """One sentence why this backend can't run the call, or None if it can."""
    return emulator.why_not_on(x.device) or unsupported(x, mask)
