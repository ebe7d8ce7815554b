"""Registration of ``fastattn::varlen_attention`` and its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._dispatch import register_backends, select
from fastattn._library import differentiate, register_op
from fastattn.ops.attention import varlen_reference
from fastattn.ops.attention._checks import check_cu_seqlens_values, check_varlen
from fastattn.ops.attention.varlen_reference import VarlenConfig

register_backends(
    "varlen_attention",
    {
        "cpu": "fastattn.ops.attention._varlen_cpu",
        "cuda": "fastattn.ops.attention._varlen_cuda",
        "triton": "fastattn.ops.attention._varlen_triton",
        "reference": "fastattn.ops.attention.varlen_reference",
        "emulator": "fastattn.ops.attention._varlen_emulator",
    },
)

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? rng_state"
)
_CONFIG = (
    "float scale, bool is_causal, bool bottom_right, int window_left, int window_right, "
    "float dropout_p, SymInt max_seqlen_q, SymInt max_seqlen_k"
)
_TENSORS = 6


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, cfg, backend = args[:_TENSORS], VarlenConfig(*args[_TENSORS:-1]), args[-1]
    check_varlen(*inputs, cfg.dropout_p)
    query, key, _, cu_seqlens_q, cu_seqlens_k, _ = inputs
    if query.device.type == "cpu":
        check_cu_seqlens_values("q", cu_seqlens_q, query.shape[0], cfg.max_seqlen_q)
        check_cu_seqlens_values("k", cu_seqlens_k, key.shape[0], cfg.max_seqlen_k)
    return select("varlen_attention", query.device, backend, *inputs, cfg).fwd(*inputs, cfg)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, cfg = args[:_TENSORS], VarlenConfig(*args[_TENSORS:-1])
    check_varlen(*inputs, cfg.dropout_p)
    query, _, value = inputs[:3]
    tokens, heads, _ = query.shape
    lse = query.new_empty(heads, tokens, dtype=torch.promote_types(query.dtype, torch.float32))
    return query.new_empty(tokens, heads, value.shape[-1]), lse, torch.empty_like(lse)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, needs, backend = args
    grads, inputs, saved = tensors[:2], tensors[2:8], tensors[8:11]
    cfg = VarlenConfig(*tensors[11:])
    chosen = select("varlen_attention", inputs[0].device, backend, *inputs, cfg)
    found = chosen.bwd(*grads, *inputs, *saved, cfg, tuple(needs))
    return tuple(inputs[0].new_empty(0) if g is None else g for g in found)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    query, key, value = args[2:5]
    return tuple(
        x.new_empty(x.shape if need else 0)
        for x, need in zip((query, key, value), args[-2], strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.scalars = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad_output, grad_lse, _grad_lse_low):
    *config, backend = ctx.scalars
    needs = list(ctx.needs_input_grad[:3])
    rest = (None,) * (_TENSORS - 3 + len(ctx.scalars))
    if grad_output is None and grad_lse is None:
        return None, None, None, *rest
    found = varlen_attention_backward(
        grad_output, grad_lse, *ctx.saved_tensors, *config, needs, backend
    )
    return (*(g if need else None for g, need in zip(found, needs, strict=True)), *rest)


def _setup_double_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:11])
    ctx.scalars = inputs[11:]
    ctx.set_materialize_grads(False)


def _double_autograd(ctx: Any, *grad_grads: Tensor | None):
    *config, needs, _backend = ctx.scalars

    def formula(*tensors: Tensor) -> tuple[Tensor | None, ...]:
        return varlen_reference.bwd(*tensors, VarlenConfig(*config), tuple(needs))

    found = differentiate(formula, ctx.saved_tensors, grad_grads)
    return (*found, *(None for _ in ctx.scalars))


def _flops(query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, *_: Any):
    pairs = int((ends_q.diff().long() * ends_k.diff()).sum())
    return 2 * query.shape[1] * pairs * (query.shape[2] + value.shape[2])


def _backward_flops(_o: Any, _l: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any):
    pairs = int((rest[0].diff().long() * rest[1].diff()).sum())
    return 2 * query.shape[1] * pairs * (3 * query.shape[2] + 2 * value.shape[2])


varlen_attention = register_op(
    f"varlen_attention({_INPUTS}, {_CONFIG}, str backend) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
    flops=_flops,
)

varlen_attention_backward = register_op(
    "varlen_attention_backward(Tensor? grad_output, Tensor? grad_lse, "
    f"{_INPUTS}, Tensor output, Tensor lse, Tensor lse_low, {_CONFIG}, bool[3] needs, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    setup_context=_setup_double_context,
    backward=_double_autograd,
    flops=_backward_flops,
)
