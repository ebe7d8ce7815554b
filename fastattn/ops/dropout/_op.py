"""Registration of ``fastattn::dropout``, which is its own backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._checks import check_floating, check_probability, check_rng_state
from fastattn._dispatch import register_backends, select
from fastattn._library import register_op

register_backends(
    "dropout",
    {
        "cpu": "fastattn.ops.dropout._cpu",
        "cuda": "fastattn.ops.dropout._cuda",
        "triton": "fastattn.ops.dropout._triton",
        "reference": "fastattn.ops.dropout.reference",
        "emulator": "fastattn.ops.dropout._emulator",
    },
)


def _check_dropout(x: Tensor, rng_state: Tensor, p: float) -> None:
    check_floating("x", x)
    check_probability("p", p)
    check_rng_state(rng_state, p, x)


def _forward(x: Tensor, rng_state: Tensor, p: float, backend: str) -> Tensor:
    _check_dropout(x, rng_state, p)
    return select("dropout", x.device, backend, x, rng_state, p).fwd(x, rng_state, p)


def _forward_fake(x: Tensor, rng_state: Tensor, p: float, backend: str) -> Tensor:
    _check_dropout(x, rng_state, p)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rng_state, ctx.p, ctx.backend = inputs
    ctx.save_for_backward(rng_state)


def _autograd(ctx: Any, grad: Tensor):
    return dropout(grad, ctx.saved_tensors[0], ctx.p, ctx.backend), None, None, None


dropout = register_op(
    "dropout(Tensor x, Tensor rng_state, float p, str backend) -> Tensor",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)
