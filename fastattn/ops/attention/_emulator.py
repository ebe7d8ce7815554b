"""The kernels of the ``cuda`` backend on emulated threads, by the same host code."""

from __future__ import annotations

from torch import Tensor

from fastattn._cuda import emulator
from fastattn.ops.attention._cuda import bwd, fwd, unsupported
from fastattn.ops.attention.reference import AttentionConfig

__all__ = ["bwd", "fwd", "why_not"]


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    rng_state: Tensor | None,
    cfg: AttentionConfig,
) -> str | None:
    """One sentence why this backend can't run the call, or None if it can."""
    return emulator.why_not_on(query.device) or unsupported(query, key, value)
