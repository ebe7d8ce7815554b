"""Attention on the CPU, by the SIMD kernels of csrc/attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _native
from fastattn.ops.attention.reference import (
    AttentionConfig,
    empty_gradients,
    empty_output,
    sum_to_mask,
)

_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))


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
    if not query.is_cpu:
        return f"query is on {query.device}, the cpu backend needs it on the CPU"
    if not _native.available():
        return _native.why_not_available()
    if query.dtype not in _DTYPES:
        return f"query is {query.dtype}; float32, float64, float16 and bfloat16 run on the CPU"
    return None


def fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    rng_state: Tensor | None,
    cfg: AttentionConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output, lse, lse_low, weights) as ``reference.fwd``; the backward always needs the LSE."""
    batch, heads, q_len, _ = query.shape
    statistics = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = empty_output(query, value)
    lse, lse_low = (torch.empty(batch, heads, q_len, dtype=statistics) for _ in range(2))
    weights = query.new_empty((batch, heads, q_len, key.shape[2]) if cfg.return_weights else 0)
    _native.lib().attention_forward(
        query,
        key,
        value,
        attn_mask,
        key_padding_mask,
        None,
        None,
        rng_state,
        *cfg[:6],
        output,
        lse,
        lse_low,
        weights if cfg.return_weights else None,
        torch.get_num_threads(),
    )
    return output, lse, lse_low, weights


def bwd(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    rng_state: Tensor | None,
    output: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    cfg: AttentionConfig,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value and attn_mask as ``reference.bwd``, None where not needed.

    The gradient of attn_mask takes a temporary [B, Hq, Lq, Lk] of the statistics' dtype.
    """
    grads = empty_gradients((query, key, value), needs)
    grad_scores = None
    if needs[3] and attn_mask is not None:
        grad_scores = lse.new_zeros(*query.shape[:3], key.shape[2])
    _native.lib().attention_backward(
        grad_output,
        grad_lse,
        grad_weights,
        query,
        key,
        value,
        attn_mask,
        key_padding_mask,
        None,
        None,
        rng_state,
        *cfg[:6],
        output,
        lse,
        lse_low,
        *grads,
        grad_scores,
        torch.get_num_threads(),
    )
    grad_mask = None
    if grad_scores is not None and attn_mask is not None:
        grad_mask = sum_to_mask(grad_scores, attn_mask)
    return *grads, grad_mask
