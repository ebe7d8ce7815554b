"""Registration of ``fastattn::attention`` and its backward: schema, checks, fake, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._dispatch import register_backends, select
from fastattn._library import differentiate, register_op
from fastattn.ops.attention import reference
from fastattn.ops.attention._checks import check_attention
from fastattn.ops.attention.reference import AttentionConfig, empty_like_heads, empty_output

register_backends(
    "attention",
    {
        "cpu": "fastattn.ops.attention._cpu",
        "cuda": "fastattn.ops.attention._cuda",
        "triton": "fastattn.ops.attention._triton",
        "torch": "fastattn.ops.attention._torch",
        "reference": "fastattn.ops.attention.reference",
        "emulator": "fastattn.ops.attention._emulator",
    },
)

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_padding_mask, "
    "Tensor? rng_state"
)
_CONFIG = (
    "float scale, bool is_causal, bool bottom_right, int window_left, int window_right, "
    "float dropout_p, bool return_weights, bool need_lse"
)
_TENSORS = 6  # of the forward's arguments; AttentionConfig and the backend follow


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, cfg, backend = args[:_TENSORS], AttentionConfig(*args[_TENSORS:-1]), args[-1]
    check_attention(*inputs, cfg.dropout_p)
    return select("attention", inputs[0].device, backend, *inputs, cfg).fwd(*inputs, cfg)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, cfg = args[:_TENSORS], AttentionConfig(*args[_TENSORS:-1])
    check_attention(*inputs, cfg.dropout_p)
    query, key, value = inputs[:3]
    batch, heads, q_len, _ = query.shape
    lse = query.new_empty(batch, heads, q_len, dtype=_stat_dtype(query))
    shape = (batch, heads, q_len, key.shape[2]) if cfg.return_weights else (0,)
    return empty_output(query, value), lse, torch.empty_like(lse), query.new_empty(shape)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *tensors, needs, backend = args
    grads, inputs, saved = tensors[:3], tensors[3:9], tensors[9:12]
    cfg = AttentionConfig(*tensors[12:])
    chosen = select("attention", inputs[0].device, backend, *inputs, cfg)
    found = chosen.bwd(*grads, *inputs, *saved, cfg, tuple(needs))
    return tuple(inputs[0].new_empty(0) if g is None else g for g in found)


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, attn_mask = args[3:7]
    needs = args[-2]
    grads = [
        empty_like_heads(x) if need else query.new_empty(0)
        for x, need in zip((query, key, value), needs, strict=False)
    ]
    wanted = needs[3] and attn_mask is not None
    return *grads, attn_mask.new_empty(attn_mask.shape) if wanted else query.new_empty(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output[:3])
    ctx.scalars = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad_output, grad_lse, _grad_lse_low, grad_weights):
    *config, backend = ctx.scalars
    needs = list(ctx.needs_input_grad[:4])
    if not AttentionConfig(*config).return_weights:
        grad_weights = None
    if grad_output is None and grad_lse is None and grad_weights is None:
        return (None,) * (_TENSORS + len(ctx.scalars))
    found = attention_backward(
        grad_output, grad_lse, grad_weights, *ctx.saved_tensors, *config, needs, backend
    )
    grads = [g if need else None for g, need in zip(found, needs, strict=True)]
    return (*grads, *(None for _ in range(_TENSORS - 4 + len(ctx.scalars))))


def _setup_double_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:12])
    ctx.scalars = inputs[12:]
    ctx.set_materialize_grads(False)


def _double_autograd(ctx: Any, *grad_grads: Tensor | None):
    *config, needs, backend = ctx.scalars
    cfg, tensors = AttentionConfig(*config), list(ctx.saved_tensors)
    inputs = tensors[3:9]
    if select("attention", inputs[0].device, backend, *inputs, cfg).name == "torch":
        query, key, _, attn_mask, key_padding_mask, _ = inputs  # it has kept no log-sum-exp
        tensors[10:12] = reference.log_sum_exp(query, key, attn_mask, key_padding_mask, cfg)

    def formula(*tensors: Tensor) -> tuple[Tensor | None, ...]:
        return reference.bwd(*tensors, cfg, tuple(needs))

    found = differentiate(formula, tuple(tensors), grad_grads)
    return (*found, *(None for _ in ctx.scalars))


def _stat_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _flops(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    batch, heads, q_len, width = query.shape
    return 2 * batch * heads * q_len * key.shape[2] * (width + value.shape[3])


def _backward_flops(_o: Any, _l: Any, _w: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any):
    batch, heads, q_len, width = query.shape
    return 2 * batch * heads * q_len * key.shape[2] * (3 * width + 2 * value.shape[3])


attention = register_op(
    f"attention({_INPUTS}, {_CONFIG}, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
    flops=_flops,
)

attention_backward = register_op(
    "attention_backward(Tensor? grad_output, Tensor? grad_lse, Tensor? grad_weights, "
    f"{_INPUTS}, Tensor output, Tensor lse, Tensor lse_low, {_CONFIG}, bool[4] needs, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    setup_context=_setup_double_context,
    backward=_double_autograd,
    flops=_backward_flops,
)
