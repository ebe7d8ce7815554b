"""What callers of attention may give, brought to the four dimensions and numbers the op takes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastattn._checks import check_bool, check_floating, check_number, check_probability, describe
from fastattn.ops.attention._checks import check_mask, check_padding


def to_four_dims(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...] | None]:
    """[B, H, L, D] each, the mask likewise, and the leading shape to give back (None: as is)."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_floating(name, x)
        if x.dim() < 2:
            raise ValueError(f"{name} is {describe(x)}; [..., H, L, D] or [L, D] is accepted")
    if max(query.dim(), key.dim(), value.dim()) > 3:
        query, key, value = _broadcast_heads(query, key, value)
    if query.dim() == key.dim() == value.dim() == 4:
        if query.shape[0] == key.shape[0] == value.shape[0]:
            return query, key, value, _maskto_four_dims(attn_mask), None
    lead = 3 if max(query.dim(), key.dim(), value.dim()) > 3 else 2
    q, k, v = (_pad_dims(x, lead) for x in (query, key, value))
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-lead] for x in (q, k, v)))
    except RuntimeError:
        raise ValueError(
            f"query is {describe(query)}, key {describe(key)}, value {describe(value)}; "
            "leading dimensions that broadcast are accepted"
        ) from None
    q, k, v = (x.expand(*batch, *x.shape[-lead:]) for x in (q, k, v))
    shape = (*batch, *q.shape[-lead:-2])
    if lead == 2:
        q, k, v = (x.unsqueeze(-3) for x in (q, k, v))
        attn_mask = None if attn_mask is None else _pad_dims(attn_mask, 2).unsqueeze(-3)
    if attn_mask is not None:
        attn_mask = _flatten_mask(attn_mask, batch)
    q, k, v = (x.reshape(-1, *x.shape[-3:]) if x.dim() != 4 else x for x in (q, k, v))
    return q, k, v, attn_mask, shape


def _broadcast_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One head of a query, or of key or value alone, serves all; of both the kernels know it."""
    q_heads, k_heads, v_heads = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value))
    if k_heads != v_heads and 1 in (k_heads, v_heads):
        k_heads = max(k_heads, v_heads)
        key, value = _with_heads(key, k_heads), _with_heads(value, k_heads)
    return _with_heads(query, k_heads) if q_heads == 1 != k_heads else query, key, value


def _with_heads(x: Tensor, heads: int) -> Tensor:
    x = _pad_dims(x, 3)
    return x.expand(*x.shape[:-3], heads, *x.shape[-2:])


def _pad_dims(x: Tensor, least: int) -> Tensor:
    return x[(None,) * (least - x.dim())] if x.dim() < least else x


def _maskto_four_dims(attn_mask: Tensor | None) -> Tensor | None:
    return attn_mask if attn_mask is None else _pad_dims(attn_mask, 4)


def _flatten_mask(attn_mask: Tensor, batch: torch.Size) -> Tensor:
    """[..., H, Lq, Lk] to four dimensions, the leading ones expanded only if there are several."""
    mask = _pad_dims(attn_mask, 4)
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    try:
        mask = mask.expand(*batch, *mask.shape[-3:])
    except RuntimeError:
        raise ValueError(
            f"attn_mask is {describe(attn_mask)}; leading dimensions that broadcast to the "
            f"query's {tuple(batch)} are accepted"
        ) from None
    return mask.reshape(-1, *mask.shape[-3:])


def add_to_mask(attn_mask: Tensor | None, padding: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """attn_mask plus a floating key_padding_mask [B, Lk]."""
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    check_padding(padding, query, (batch, kv_len))
    if attn_mask is not None:
        check_mask(attn_mask, query, (batch, heads, q_len, kv_len))
    added = padding[:, None, None, :].to(torch.promote_types(query.dtype, torch.float32))
    if attn_mask is None:
        return added
    if attn_mask.dtype == torch.bool:
        return torch.where(attn_mask, added, float("-inf"))
    return attn_mask + added


def check_scalars(dropout_p: float, is_causal: bool, scale: float | None) -> None:
    check_probability("dropout_p", dropout_p)
    check_bool("is_causal", is_causal)
    if scale is not None:
        check_number("scale", scale)


def check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and kv_heads != 1 and not enable_gqa:
        raise ValueError(
            f"query has {heads} heads but key has {kv_heads}; the same number is accepted, "
            "or with enable_gqa=True a multiple"
        )


def default_scale(query: Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
