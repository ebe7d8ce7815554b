"""Attention over packed sequences on the CPU, by the SIMD kernels of csrc/attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _native
from fastattn.ops.attention import _cpu
from fastattn.ops.attention.reference import AttentionConfig
from fastattn.ops.attention.varlen_reference import VarlenConfig


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
    return _cpu.why_not(
        query, key, value, None, None, rng_state, AttentionConfig(*cfg[:6], False, False)
    )


def fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    rng_state: Tensor | None,
    cfg: VarlenConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse, lse_low) as ``varlen_reference.fwd``."""
    tokens, heads, _ = query.shape
    statistics = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = query.new_empty(tokens, heads, value.shape[-1])
    lse, lse_low = (torch.empty(heads, tokens, dtype=statistics) for _ in range(2))
    _native.lib().attention_forward(
        query,
        key,
        value,
        None,
        None,
        cu_seqlens_q.contiguous(),
        cu_seqlens_k.contiguous(),
        rng_state,
        *cfg[:6],
        output,
        lse,
        lse_low,
        None,
        torch.get_num_threads(),
    )
    return output, lse, lse_low


def bwd(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    rng_state: Tensor | None,
    output: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    cfg: VarlenConfig,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key and value, None where not needed."""
    grads = [
        x.new_empty(x.shape) if need else None
        for x, need in zip((query, key, value), needs, strict=True)
    ]
    _native.lib().attention_backward(
        grad_output,
        grad_lse,
        None,
        query,
        key,
        value,
        None,
        None,
        cu_seqlens_q.contiguous(),
        cu_seqlens_k.contiguous(),
        rng_state,
        *cfg[:6],
        output,
        lse,
        lse_low,
        *grads,
        None,
        torch.get_num_threads(),
    )
    return tuple(grads)
