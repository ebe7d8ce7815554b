"""Attention by Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.ops.attention import _triton_launch
from fastattn.ops.attention._triton_launch import Problem, dense, why_not_heads
from fastattn.ops.attention.reference import (
    AttentionConfig,
    empty_gradients,
    empty_output,
    sum_to_mask,
)


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
    return why_not_heads(query, key, value, query.shape[0] * query.shape[1], query.shape[2])


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
    problem = _problem(query, key, value, attn_mask, key_padding_mask, rng_state, cfg)
    output = empty_output(query, value)
    lse, lse_low = (query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(2))
    _triton_launch.forward(problem, output, lse, lse_low)
    weights = query.new_empty(0)
    if cfg.return_weights:
        weights = query.new_empty(*query.shape[:3], key.shape[2])
        _triton_launch.weights(problem, lse, lse_low, weights)
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
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key, value and attn_mask as ``reference.bwd``, None where not needed.

    The gradients of attn_mask and through the weights take a temporary float32 [B, Hq, Lq, Lk].
    """
    problem = _problem(query, key, value, attn_mask, key_padding_mask, rng_state, cfg)
    shape = (*query.shape[:3], key.shape[2])
    weight_sums = None
    if grad_weights is not None:
        weights = lse.new_empty(shape)
        _triton_launch.weights(problem, lse, lse_low, weights)
        weight_sums = (weights * grad_weights).sum(-1)
        grad_weights = dense(grad_weights)
    grad_output = torch.zeros_like(output) if grad_output is None else dense(grad_output)
    grads = empty_gradients((query, key, value), needs)
    wants_scores = needs[3] and attn_mask is not None
    grad_scores = lse.new_zeros(shape) if wants_scores else None
    delta = torch.empty_like(lse)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    _triton_launch.delta(problem, output, grad_output, grad_lse, weight_sums, delta)
    _triton_launch.backward(
        problem, grad_output, grad_weights, lse, lse_low, delta, *grads, grad_scores
    )
    grad_mask = None
    if grad_scores is not None:
        grad_mask = sum_to_mask(grad_scores, attn_mask)
    return *grads, grad_mask


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    rng_state: Tensor | None,
    cfg: AttentionConfig,
) -> Problem:
    shape = (*query.shape[:3], key.shape[2])
    mask = attn_mask
    if mask is not None:
        is_spread = mask.shape[-1] == 1 or mask.stride(-1) == 0
        mask = (mask[..., :1] if is_spread else dense(mask)).expand(shape)
    return Problem(
        *map(dense, (query, key, value)), mask, key_padding_mask, rng_state, None, *shape[2:],
        *cfg[:6],
    )  # fmt: skip
