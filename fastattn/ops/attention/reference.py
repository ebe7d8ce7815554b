"""Scaled dot-product attention in plain PyTorch: the specification every kernel answers to.

    output = dropout(softmax(scale * Q K^T + mask)) V          (Vaswani et al. 2017, section 3.2.1)

Letters: B batch, Hq and Hk heads of the queries and of the keys (Hq a multiple of Hk), Lq and Lk
lengths, Dk and Dv head dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn._philox import attention_keep_mask, keep_scale


class AttentionConfig(NamedTuple):
    """What is not a tensor. ``window_*``: -1 is unlimited; ``bottom_right``: of the diagonal."""

    scale: float
    is_causal: bool
    bottom_right: bool
    window_left: int
    window_right: int
    dropout_p: float
    return_weights: bool
    need_lse: bool


def why_not(*_: object) -> str | None:
    return None


def fwd(
    query: Tensor,  # [B, Hq, Lq, Dk]
    key: Tensor,  # [B, Hk, Lk, Dk]
    value: Tensor,  # [B, Hk, Lk, Dv]
    attn_mask: Tensor | None,  # each dimension 1 or that of [B, Hq, Lq, Lk]; bool True = may attend
    key_padding_mask: Tensor | None,  # bool [B, Lk]; True = padding
    rng_state: Tensor | None,  # int64 [2]
    cfg: AttentionConfig,
    first_head: int = 0,  # of the dropout counter, when the batch is one sequence of many
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output [B, Hq, Lq, Dv], lse [B, Hq, Lq], lse_low [B, Hq, Lq], weights [B, Hq, Lq, Lk]).

    ``lse + lse_low`` is the log-sum-exp with its rounding error kept apart: scores of 1e6 leave
    one number no bits for the logarithm, and the backward needs it. ``weights``: empty if unwanted.
    """
    q, k, v = _compute_form(query, key, value, key_padding_mask)
    scores = _masked_scores(q, k, attn_mask, key_padding_mask, cfg)
    lse, lse_low = _logsumexp(scores)
    weights = _softmax(scores, lse, lse_low)
    if cfg.dropout_p > 0:
        weights = weights * _dropout_factor(rng_state, scores, cfg, first_head)
    output = empty_output(query, value)
    output.copy_(weights @ v)
    kept = weights.to(query.dtype) if cfg.return_weights else query.new_empty(0)
    return output, lse, lse_low, kept


def bwd(
    grad_output: Tensor | None,  # [B, Hq, Lq, Dv]
    grad_lse: Tensor | None,  # [B, Hq, Lq]
    grad_weights: Tensor | None,  # [B, Hq, Lq, Lk]
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
    needs: tuple[bool, bool, bool, bool],  # query, key, value, attn_mask
    first_head: int = 0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key, value and attn_mask, with P recomputed from the saved LSE.

    dP = (dO V^T + dW) * keep / (1 - p);  delta = rowsum(dO * O) + rowsum(dW * W) - dLSE;
    dS = P * (dP - delta);  dQ = scale * dS K;  dK = scale * dS^T Q;  dV = W^T dO.
    """
    q, k, v = _compute_form(query, key, value, key_padding_mask)
    scores = _masked_scores(q, k, attn_mask, key_padding_mask, cfg)
    probabilities = _softmax(scores, lse, lse_low)
    grad_out = torch.zeros_like(output) if grad_output is None else grad_output
    grad_out = grad_out.to(q.dtype)
    grad_p = grad_out @ v.transpose(-1, -2)
    if grad_weights is not None:
        grad_p = grad_p + grad_weights.to(q.dtype)
    weights = probabilities
    if cfg.dropout_p > 0:
        factor = _dropout_factor(rng_state, scores, cfg, first_head)
        weights, grad_p = probabilities * factor, grad_p * factor
    delta = (grad_out * output.to(q.dtype)).sum(-1)
    if grad_weights is not None:
        delta = delta + (grad_weights.to(q.dtype) * weights).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    grad_scores = probabilities * (grad_p - delta.unsqueeze(-1))

    grad_q = grad_k = grad_v = grad_mask = None
    if needs[0]:
        grad_q = _as_layout(cfg.scale * (grad_scores @ k), query)
    if needs[1]:
        grad_k = _as_layout(_sum_groups(cfg.scale * grad_scores.transpose(-1, -2) @ q, key), key)
    if needs[2]:
        grad_v = _as_layout(_sum_groups(weights.transpose(-1, -2) @ grad_out, value), value)
    if needs[3] and attn_mask is not None:
        grad_mask = sum_to_mask(grad_scores, attn_mask)
    return grad_q, grad_k, grad_v, grad_mask


def log_sum_exp(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    cfg: AttentionConfig,
) -> tuple[Tensor, Tensor]:
    """(lse, lse_low) of ``fwd`` alone, for a backend whose forward keeps none."""
    q, k, _ = _compute_form(query, key, key, key_padding_mask)
    return _logsumexp(_masked_scores(q, k, attn_mask, key_padding_mask, cfg))


def empty_like_heads(x: Tensor, head_dim: int | None = None) -> Tensor:
    """Uninitialised [B, H, L, D] whose memory order is [B, L, H, D], so merging heads is free."""
    batch, heads, length, last = x.shape
    return x.new_empty(batch, length, heads, head_dim or last).transpose(1, 2)


def empty_gradients(tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """Of query, key and value, each to be written whole; None where not needed."""
    return [empty_like_heads(x) if need else None for x, need in zip(tensors, needs, strict=False)]


def sum_to_mask(grad_scores: Tensor, attn_mask: Tensor) -> Tensor:
    """The gradient of attn_mask out of that of the scores [B, Hq, Lq, Lk]."""
    return grad_scores.sum_to_size(attn_mask.shape).to(attn_mask.dtype)


def empty_output(query: Tensor, value: Tensor) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)


def visible(q_len: int, kv_len: int, cfg: AttentionConfig, device: torch.device) -> Tensor | None:
    """Bool [Lq, Lk]: the keys that causal and window leave to each query; None if all."""
    if not cfg.is_causal and cfg.window_left < 0 and cfg.window_right < 0:
        return None
    diagonal = kv_len - q_len if cfg.bottom_right else 0
    query = torch.arange(q_len, device=device).unsqueeze(-1) + diagonal
    key = torch.arange(kv_len, device=device)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if cfg.is_causal:
        seen = seen & (key <= query)
    if cfg.window_left >= 0:
        seen = seen & (key >= query - cfg.window_left)
    if cfg.window_right >= 0:
        seen = seen & (key <= query + cfg.window_right)
    return seen


_NEG = float("-inf")


def _compute_form(
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 (fp64 stays), key heads repeated for their queries, padded keys and values zero."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
    if key_padding_mask is not None:
        hidden = key_padding_mask[:, None, :, None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    groups = query.shape[1] // max(key.shape[1], 1)
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return q, k, v


def _masked_scores(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    cfg: AttentionConfig,
) -> Tensor:
    """scale * Q K^T + mask, with -inf at every key that is hidden: [B, Hq, Lq, Lk]."""
    scores = cfg.scale * (q @ k.transpose(-1, -2))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, _NEG)
        else:
            scores = scores + attn_mask.to(scores.dtype)
    seen = visible(q.shape[2], k.shape[2], cfg, q.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, _NEG)
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None, :], _NEG)
    return scores


def _logsumexp(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Natural log-sum-exp over the last dimension and its rounding error; (-inf, 0) for no key."""
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], _NEG), scores.new_zeros(scores.shape[:-1])
    highest = scores.amax(-1)
    empty = highest == _NEG
    highest = highest.masked_fill(empty, 0.0)
    log_sum = torch.exp(scores - highest.unsqueeze(-1)).sum(-1).log()
    lse = highest + log_sum
    lse_low = (highest - lse) + log_sum
    return lse.masked_fill(empty, _NEG), lse_low.masked_fill(empty, 0.0)


def _softmax(scores: Tensor, lse: Tensor, lse_low: Tensor) -> Tensor:
    """exp(scores - lse); 0 in a row that sees nothing, where (-inf) - (-inf) must not be formed."""
    safe = lse.masked_fill(lse == _NEG, 0.0)
    return torch.exp((scores - safe.unsqueeze(-1)) - lse_low.unsqueeze(-1))


def _dropout_factor(
    rng_state: Tensor | None, scores: Tensor, cfg: AttentionConfig, first_head: int
) -> Tensor:
    assert rng_state is not None
    keep = attention_keep_mask(rng_state, cfg.dropout_p, scores.shape, first_head)
    return keep.to(scores.dtype) * keep_scale(cfg.dropout_p)


def _sum_groups(grad: Tensor, like: Tensor) -> Tensor:
    """[B, Hq, L, D] summed over the query heads of each key head: [B, Hk, L, D]."""
    batch, heads, length, dim = grad.shape
    groups = heads // max(like.shape[1], 1)
    return grad if groups <= 1 else grad.view(batch, like.shape[1], groups, length, dim).sum(2)


def _as_layout(grad: Tensor, like: Tensor) -> Tensor:
    return empty_like_heads(like).copy_(grad)
