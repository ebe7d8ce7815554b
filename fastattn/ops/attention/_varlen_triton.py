"""Attention over packed sequences by the Triton kernels of padded batches."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.ops.attention import _triton_launch
from fastattn.ops.attention._triton_launch import Problem, dense, why_not_heads
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
    sequences = cu_seqlens_q.shape[0] - 1
    return why_not_heads(query, key, value, sequences * query.shape[1], cfg.max_seqlen_q)


def fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    rng_state: Tensor | None,
    cfg: VarlenConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output [Tq, Hq, Dv], lse [Hq, Tq], lse_low [Hq, Tq]) as ``varlen_reference.fwd``."""
    problem = _problem(query, key, value, cu_seqlens_q, cu_seqlens_k, rng_state, cfg)
    tokens, heads, _ = query.shape
    output = query.new_empty(tokens, heads, value.shape[-1])
    lse, lse_low = (query.new_empty(heads, tokens, dtype=torch.float32) for _ in range(2))
    sequences = cu_seqlens_q.shape[0] - 1
    _triton_launch.forward(
        problem, _spread(output, sequences), *(x.expand(sequences, -1, -1) for x in (lse, lse_low))
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
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key and value as ``varlen_reference.bwd``, None where not needed."""
    problem = _problem(query, key, value, cu_seqlens_q, cu_seqlens_k, rng_state, cfg)
    sequences = cu_seqlens_q.shape[0] - 1
    grad_output = torch.zeros_like(output) if grad_output is None else dense(grad_output)
    grads = [
        x.new_empty(x.shape) if need else None
        for x, need in zip((query, key, value), needs, strict=True)
    ]
    grad_output = _spread(grad_output, sequences)
    delta = torch.empty_like(lse)
    spread_lse, spread_low, spread_delta = (
        x.expand(sequences, -1, -1) for x in (lse, lse_low, delta)
    )
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    _triton_launch.delta(
        problem, _spread(output, sequences), grad_output, grad_lse, None, spread_delta
    )
    _triton_launch.backward(
        problem, grad_output, None, spread_lse, spread_low, spread_delta,
        *(None if g is None else _spread(g, sequences) for g in grads), None,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    rng_state: Tensor | None,
    cfg: VarlenConfig,
) -> Problem:
    sequences = cu_seqlens_q.shape[0] - 1
    packed = (_spread(dense(x), sequences) for x in (query, key, value))
    ends = tuple(x.contiguous() for x in (cu_seqlens_q, cu_seqlens_k))
    lengths = min(cfg.max_seqlen_q, query.shape[0]), min(cfg.max_seqlen_k, key.shape[0])
    return Problem(*packed, None, None, rng_state, ends, *lengths, *cfg[:6])


def _spread(x: Tensor, sequences: int) -> Tensor:
    """[T, H, D] as [B, H, T, D] of batch stride 0: a kernel adds the start of its sequence."""
    return x.transpose(0, 1).expand(sequences, -1, -1, -1)
