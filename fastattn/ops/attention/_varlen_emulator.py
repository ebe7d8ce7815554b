"""The kernels of packed attention on emulated threads, by the ``cuda`` backend's host code."""

from __future__ import annotations

from torch import Tensor

from fastattn._cuda import emulator
from fastattn.ops.attention._varlen_cuda import bwd, fwd, unsupported_packed
from fastattn.ops.attention.varlen_reference import VarlenConfig

__all__ = ["bwd", "fwd", "why_not"]


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    rng_state: Tensor | None,
    cfg: VarlenConfig,
) -> str | None:
    """One sentence why this backend can't run the call, or None if it can."""
    return emulator.why_not_on(query.device) or unsupported_packed(query, key, value)
