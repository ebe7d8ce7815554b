"""Packed attention by the CUDA C++ kernels of csrc/attention, on a GPU or on emulated threads."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _cuda as cuda
from fastattn.ops.attention._cuda import Call, unsupported
from fastattn.ops.attention.varlen_reference import VarlenConfig, attention_config


def unsupported_packed(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """One sentence why the kernels can't run a call on any card, or None."""
    return unsupported(*(_heads_first(x) for x in (query, key, value)))


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    rng_state: Tensor | None,
    cfg: VarlenConfig,
) -> str | None:
    """One sentence why the ``cuda`` backend can't run the call, or None if it can."""
    return cuda.why_not_on(query.device) or unsupported_packed(query, key, value)


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
    output = query.new_empty(tokens, heads, value.shape[-1])
    lse, lse_low = (query.new_empty(heads, tokens, dtype=torch.float32) for _ in range(2))
    call = _call(query, key, value, cu_seqlens_q, cu_seqlens_k, rng_state, cfg)
    call.give(output=_heads_first(output), lse=lse, lse_low=lse_low)
    call.forward()
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
    """Gradients of query, key and value, None where not needed."""
    if grad_output is None:
        grad_output = query.new_zeros(()).expand_as(output)
    grads = [
        x.new_empty(x.shape) if need else None
        for x, need in zip((query, key, value), needs, strict=True)
    ]
    call = _call(query, key, value, cu_seqlens_q, cu_seqlens_k, rng_state, cfg)
    call.give(
        output=_heads_first(output),
        lse=lse.contiguous(),
        lse_low=lse_low.contiguous(),
        grad_output=_heads_first(grad_output),
        grad_lse=None if grad_lse is None else grad_lse.contiguous(),
        grad_weights=None,
        grad_scores=None,
        **{
            f"grad_{name}": None if grad is None else _heads_first(grad)
            for name, grad in zip(("query", "key", "value"), grads, strict=True)
        },
    )
    call.backward()
    return grads[0], grads[1], grads[2]


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    rng_state: Tensor | None,
    cfg: VarlenConfig,
) -> Call:
    return Call(
        _heads_first(query),
        _heads_first(key),
        _heads_first(value),
        None,
        None,
        rng_state,
        attention_config(cfg),
        ends=(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()),
        longest=(
            min(cfg.max_seqlen_q, query.shape[0]),
            min(cfg.max_seqlen_k, key.shape[0]),
        ),
    )


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D]"""
    return x.transpose(0, 1).unsqueeze(0)
