"""The CUDA kernel of linear_cross_entropy on emulated threads, for tests."""

from __future__ import annotations

from torch import Tensor

from fastattn._cuda import emulator
from fastattn.ops.cross_entropy._cuda import bwd, fwd, unsupported
from fastattn.ops.cross_entropy.reference import CrossEntropyConfig

__all__ = ["bwd", "fwd", "why_not"]


def why_not(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    target: Tensor,
    cfg: CrossEntropyConfig,
    needs: tuple[bool, bool, bool],
) -> str | None:
    """One sentence why this backend can't run the call, or None if it can."""
    return emulator.why_not_on(hidden.device) or unsupported(hidden, weight, bias, class_weight)
