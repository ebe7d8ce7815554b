"""The CUDA kernel of dropout on emulated threads, for tests."""

from __future__ import annotations

from torch import Tensor

from fastattn._cuda import emulator
from fastattn.ops.dropout._cuda import fwd, unsupported

__all__ = ["fwd", "why_not"]


def why_not(x: Tensor, rng_state: Tensor, p: float) -> str | None:
    """One sentence why this backend can't run the call, or None if it can."""
    return emulator.why_not_on(x.device) or unsupported(x, rng_state, p)
