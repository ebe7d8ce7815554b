"""What attention accepts, padded or packed; shared by the fake and the real implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn._checks import (
    check_device,
    check_floating,
    check_like,
    check_probability,
    check_rng_state,
    describe,
)


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
) -> None:
    _check_qkv(query, key, value, ndim=4, layout="[B, H, L, D]")
    batch, heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    if key.shape[0] != batch:
        raise ValueError(
            f"key is {describe(key)} but query is {describe(query)}; the same batch is accepted"
        )
    if value.shape[2] != kv_len:
        raise ValueError(
            f"value is {describe(value)} but key is {describe(key)}; the same length is accepted"
        )
    if attn_mask is not None:
        check_mask(attn_mask, query, (batch, heads, q_len, kv_len))
    if key_padding_mask is not None:
        if key_padding_mask.dtype != torch.bool:
            raise TypeError(f"key_padding_mask is {describe(key_padding_mask)}; bool is accepted")
        check_padding(key_padding_mask, query, (batch, kv_len))
    check_probability("dropout_p", dropout_p)
    check_rng_state(rng_state, dropout_p, query)


def check_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    rng_state: Tensor | None,
    dropout_p: float,
) -> None:
    _check_qkv(query, key, value, ndim=3, layout="packed [T, H, D]")
    if value.shape[0] != key.shape[0]:
        raise ValueError(
            f"value is {describe(value)} but key is {describe(key)}; as many tokens are accepted"
        )
    _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, query)
    _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, query)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k has {cu_seqlens_k.shape[0]} entries but cu_seqlens_q has "
            f"{cu_seqlens_q.shape[0]}; one per sequence and one more is accepted in both"
        )
    check_probability("dropout_p", dropout_p)
    check_rng_state(rng_state, dropout_p, query)


def check_cu_seqlens_values(which: str, cu_seqlens: Tensor, tokens: int, longest: int) -> None:
    """On the CPU, where looking at them costs nothing: from 0 to ``tokens``, never falling, no
    sequence longer than ``longest``; ``which`` is "q" or "k"."""
    name, ends = f"cu_seqlens_{which}", cu_seqlens.tolist()
    rising = all(a <= b for a, b in zip(ends, ends[1:], strict=False))
    if ends[0] != 0 or ends[-1] != tokens or not rising:
        raise ValueError(
            f"{name} is {_shorten(ends)}; rising offsets from 0 to the {tokens} tokens are accepted"
        )
    found = max((b - a for a, b in zip(ends, ends[1:], strict=False)), default=0)
    if found > longest:
        raise ValueError(
            f"max_seqlen_{which} is {longest} but a sequence has {found} tokens; at least as many "
            "are accepted"
        )


def _shorten(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"{values[:4]}...{values[-2:]}"


def _check_qkv(query: Tensor, key: Tensor, value: Tensor, *, ndim: int, layout: str) -> None:
    check_floating("query", query)
    for name, x in (("key", key), ("value", value)):
        check_like(name, x, "query", query)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != ndim:
            raise ValueError(f"{name} is {describe(x)}; a {ndim}-D tensor {layout} is accepted")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"key has head dimension {key.shape[-1]} but query has {query.shape[-1]}; "
            "the same is accepted"
        )
    heads_dim = 1
    q_heads, k_heads, v_heads = (x.shape[heads_dim] for x in (query, key, value))
    if v_heads != k_heads:
        raise ValueError(f"value has {v_heads} heads but key has {k_heads}; the same is accepted")
    if k_heads != q_heads and (k_heads == 0 or q_heads % k_heads):
        raise ValueError(
            f"query has {q_heads} heads but key has {k_heads}; "
            "a multiple of the number of key heads is accepted"
        )


def check_mask(attn_mask: Tensor, query: Tensor, full: tuple[int, int, int, int]) -> None:
    if attn_mask.dtype not in (torch.bool, query.dtype, torch.float32):
        raise TypeError(
            f"attn_mask is {describe(attn_mask)}; bool, float32 or the query's "
            f"{str(query.dtype).removeprefix('torch.')} is accepted"
        )
    check_device("attn_mask", attn_mask, "query", query)
    fits = attn_mask.dim() == 4 and all(
        m == 1 or m == f for m, f in zip(attn_mask.shape, full, strict=True)
    )
    if not fits:
        raise ValueError(
            f"attn_mask is {describe(attn_mask)}; a shape that broadcasts to [B, H, Lq, Lk] = "
            f"{tuple(full)} is accepted"
        )


def check_padding(key_padding_mask: Tensor, query: Tensor, full: tuple[int, int]) -> None:
    """The shape and device; a floating one is added to the mask before the op sees it."""
    check_device("key_padding_mask", key_padding_mask, "query", query)
    if tuple(key_padding_mask.shape) != full:
        raise ValueError(
            f"key_padding_mask is {describe(key_padding_mask)}; [B, Lk] = {full} is accepted"
        )


def _check_cu_seqlens(name: str, cu_seqlens: Tensor, query: Tensor) -> None:
    is_tensor = isinstance(cu_seqlens, Tensor)
    error: type[Exception] | None = None
    if not is_tensor or cu_seqlens.dtype != torch.int32:
        error = TypeError
    elif cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        error = ValueError
    if error is not None:
        raise error(
            f"{name} is {describe(cu_seqlens)}; int32 (B + 1,), the offsets of B sequences, "
            "is accepted"
        )
    check_device(name, cu_seqlens, "query", query)
