"""Registration of ``fastattn::softmax`` and its backward: schema, checks, fake, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._checks import check_device, check_floating, describe
from fastattn._dispatch import register_backends, select
from fastattn._library import differentiate, register_op
from fastattn.ops.softmax import reference

register_backends(
    "softmax",
    {
        "cpu": "fastattn.ops.softmax._cpu",
        "cuda": "fastattn.ops.softmax._cuda",
        "triton": "fastattn.ops.softmax._triton",
        "torch": "fastattn.ops.softmax._torch",
        "reference": "fastattn.ops.softmax.reference",
        "emulator": "fastattn.ops.softmax._emulator",
    },
)


def _check_softmax(x: Tensor, mask: Tensor | None, is_causal: bool) -> None:
    check_floating("x", x)
    if x.dim() < (2 if is_causal else 1):
        wanted = "[..., L, S] with is_causal" if is_causal else "[..., S]"
        raise ValueError(f"x is {describe(x)}; {wanted} is accepted")
    if mask is None:
        return
    if mask.dtype not in (torch.bool, x.dtype, torch.float32):
        raise TypeError(f"mask is {describe(mask)}; bool, float32 or x's dtype is accepted")
    check_device("mask", mask, "x", x)
    fits = mask.dim() <= x.dim() and all(
        m == 1 or m == n for m, n in zip(mask.shape[::-1], x.shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"mask is {describe(mask)}; a shape that broadcasts to x's {tuple(x.shape)} is accepted"
        )


def _forward(x: Tensor, mask: Tensor | None, is_causal: bool, scale: float, backend: str) -> Tensor:
    _check_softmax(x, mask, is_causal)
    arguments = (x, mask, is_causal, scale)
    return select("softmax", x.device, backend, *arguments).fwd(*arguments)


def _forward_fake(
    x: Tensor, mask: Tensor | None, is_causal: bool, scale: float, backend: str
) -> Tensor:
    _check_softmax(x, mask, is_causal)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward(
    grad_out: Tensor, out: Tensor, mask: Tensor | None, is_causal: bool, scale: float, backend: str
) -> Tensor:
    chosen = select("softmax", out.device, backend, out, mask, is_causal, scale)
    return chosen.bwd(grad_out, out, scale)


def _backward_fake(
    grad_out: Tensor, out: Tensor, mask: Tensor | None, is_causal: bool, scale: float, backend: str
) -> Tensor:
    return torch.empty_like(out)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, ctx.is_causal, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(output, mask)


def _autograd(ctx: Any, grad_out: Tensor):
    out, mask = ctx.saved_tensors
    needs_x, needs_mask = ctx.needs_input_grad[:2]
    scale = 1.0 if needs_mask else ctx.scale
    grad = softmax_backward(grad_out, out, mask, ctx.is_causal, scale, ctx.backend)
    if not needs_mask:
        return grad, None, None, None, None
    grad_mask = grad.sum_to_size(mask.shape).to(mask.dtype)
    return (grad * ctx.scale if needs_x else None), grad_mask, None, None, None


def _setup_double_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[4]


def _double_autograd(ctx: Any, grad: Tensor):
    found = differentiate(
        lambda g, y: (reference.bwd(g, y, ctx.scale),), ctx.saved_tensors, (grad,)
    )
    return (*found, None, None, None, None)


softmax = register_op(
    "softmax(Tensor x, Tensor? mask, bool is_causal, float scale, str backend) -> Tensor",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)

softmax_backward = register_op(
    "softmax_backward(Tensor grad_out, Tensor out, Tensor? mask, bool is_causal, float scale, "
    "str backend) -> Tensor",
    _backward,
    _backward_fake,
    setup_context=_setup_double_context,
    backward=_double_autograd,
)
