"""The CUDA kernels of add_layer_norm on emulated threads, for tests."""

from __future__ import annotations

from torch import Tensor

from fastattn._cuda import emulator
from fastattn.ops.layer_norm._cuda import bwd, fwd, unsupported

__all__ = ["bwd", "fwd", "why_not"]


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
    return emulator.why_not_on(x.device) or unsupported(x, residual, weight, bias)
