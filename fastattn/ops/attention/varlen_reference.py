"""Attention over packed sequences of different lengths: the attention reference, one by one.

Letters: T tokens of all sequences together, H heads, D head dimension, B sequences; sequence b owns
the rows ``cu_seqlens[b] : cu_seqlens[b + 1]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.ops.attention import reference
from fastattn.ops.attention.reference import AttentionConfig


class VarlenConfig(NamedTuple):
    """What is not a tensor; see ``AttentionConfig``. The lengths are upper bounds, for grids."""

    scale: float
    is_causal: bool
    bottom_right: bool
    window_left: int
    window_right: int
    dropout_p: float
    max_seqlen_q: int
    max_seqlen_k: int


def why_not(*_: object) -> str | None:
    return None


def fwd(
    query: Tensor,  # [Tq, Hq, Dk]
    key: Tensor,  # [Tk, Hk, Dk]
    value: Tensor,  # [Tk, Hk, Dv]
    cu_seqlens_q: Tensor,  # int32 [B + 1]
    cu_seqlens_k: Tensor,  # int32 [B + 1]
    rng_state: Tensor | None,
    cfg: VarlenConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output [Tq, Hq, Dv], lse [Hq, Tq], lse_low [Hq, Tq])."""
    tokens, heads, _ = query.shape
    output = query.new_empty(tokens, heads, value.shape[-1])
    lse = query.new_empty(heads, tokens, dtype=_stat_dtype(query))
    lse_low = lse.clone()
    for b, (q_rows, k_rows) in enumerate(_sequences(cu_seqlens_q, cu_seqlens_k)):
        out, one_lse, one_low, _ = reference.fwd(
            _head_first(query, q_rows),
            _head_first(key, k_rows),
            _head_first(value, k_rows),
            None,
            None,
            rng_state,
            attention_config(cfg),
            first_head=b * heads,
        )
        output[q_rows] = out[0].transpose(0, 1)
        lse[:, q_rows], lse_low[:, q_rows] = one_lse[0], one_low[0]
    return output, lse, lse_low


def bwd(
    grad_output: Tensor | None,  # [Tq, Hq, Dv]
    grad_lse: Tensor | None,  # [Hq, Tq]
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
    needs: tuple[bool, bool, bool],  # query, key, value
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key and value, None where not needed."""
    inputs = (query, key, value)
    grads = [x.new_zeros(x.shape) if need else None for x, need in zip(inputs, needs, strict=True)]
    for b, (q_rows, k_rows) in enumerate(_sequences(cu_seqlens_q, cu_seqlens_k)):
        found = reference.bwd(
            None if grad_output is None else _head_first(grad_output, q_rows),
            None if grad_lse is None else grad_lse[None, :, q_rows],
            None,
            _head_first(query, q_rows),
            _head_first(key, k_rows),
            _head_first(value, k_rows),
            None,
            None,
            rng_state,
            _head_first(output, q_rows),
            lse[None, :, q_rows],
            lse_low[None, :, q_rows],
            attention_config(cfg),
            (*needs, False),
            first_head=b * query.shape[1],
        )
        for grad, one, rows in zip(grads, found, (q_rows, k_rows, k_rows), strict=False):
            if grad is not None and one is not None:
                grad[rows] = one[0].transpose(0, 1)
    return grads[0], grads[1], grads[2]


def attention_config(cfg: VarlenConfig) -> AttentionConfig:
    return AttentionConfig(*cfg[:6], return_weights=False, need_lse=True)


def _stat_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _head_first(x: Tensor, rows: slice) -> Tensor:
    """[T, H, D] -> [1, H, L, D]"""
    return x[rows].transpose(0, 1).unsqueeze(0)


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(ends_q) - 1):
        yield slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
