"""Registration of ``fastattn::add_layer_norm`` and its backward, and the function around them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastattn._checks import (
    check_device,
    check_floating,
    check_probability,
    check_rng_state,
    describe,
)
from fastattn._dispatch import register_backends, select
from fastattn._library import differentiate, register_op
from fastattn.ops.layer_norm import reference

register_backends(
    "add_layer_norm",
    {
        "cpu": "fastattn.ops.layer_norm._cpu",
        "torch": "fastattn.ops.layer_norm._torch",
        "reference": "fastattn.ops.layer_norm.reference",
    },
)

_INPUTS = "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? rng_state"


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
    eps: float,
    return_sum: bool,
    backend: str,
) -> Tensor | tuple[Tensor, Tensor]:
    """The op, with the sum kept only where it is wanted or the backward will need it."""
    inputs = (x, residual, weight, bias)
    needs_grad = any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
    trains = needs_grad and torch.is_grad_enabled()
    is_new = residual is not None or dropout_p > 0  # else the sum is x itself
    keep_sum = is_new and (return_sum or trains)
    out, kept, _, _ = _add_layer_norm(*inputs, rng_state, dropout_p, eps, keep_sum, backend)
    if not return_sum:
        return out
    return out, kept if is_new else x


def _check_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
) -> None:
    check_floating("x", x)
    if x.dim() < 1:
        raise ValueError(f"x is {describe(x)}; [..., N] is accepted")
    if residual is not None:
        check_floating("residual", residual)
        check_device("residual", residual, "x", x)
        if residual.shape != x.shape:
            raise ValueError(
                f"residual is {describe(residual)} but x is {describe(x)}; "
                "the same shape is accepted"
            )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        check_floating(name, parameter)
        check_device(name, parameter, "x", x)
        if parameter.dim() != 1 or parameter.shape[0] != x.shape[-1]:
            raise ValueError(
                f"{name} is {describe(parameter)}; x's last dimension ({x.shape[-1]},) is accepted"
            )
    check_probability("dropout_p", dropout_p)
    check_rng_state(rng_state, dropout_p, x)


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
    eps: float,
    keep_sum: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_add_layer_norm(x, residual, weight, bias, rng_state, dropout_p)
    arguments = (x, residual, weight, bias, rng_state, dropout_p, eps, keep_sum)
    return select("add_layer_norm", x.device, backend, *arguments).fwd(*arguments)


def _forward_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
    eps: float,
    keep_sum: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_add_layer_norm(x, residual, weight, bias, rng_state, dropout_p)
    dtype = reference.sum_dtype(x, residual)
    rows = math.prod(x.shape[:-1])  # numel() would fix a dynamic batch
    stats = x.new_empty(rows, dtype=torch.promote_types(dtype, torch.float32))
    kept = x.new_empty(x.shape if keep_sum else (0,), dtype=dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, kept, stats, torch.empty_like(stats)


def _backward(
    grad_out: Tensor | None,
    grad_sum: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    kept: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    eps: float,
    needs: list[bool],
    backend: str,
) -> tuple[Tensor, ...]:
    arguments = (x, residual, weight, bias, rng_state, dropout_p, eps, True)
    chosen = select("add_layer_norm", x.device, backend, *arguments)
    found = chosen.bwd(
        grad_out,
        grad_sum,
        kept if _is_kept(kept, x) else x,
        weight,
        mean,
        rstd,
        rng_state,
        dropout_p,
        tuple(needs),
        x.dtype,
        None if residual is None else residual.dtype,
        None if bias is None else bias.dtype,
    )
    return tuple(x.new_empty(0) if g is None else g for g in found)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x, inputs, needs = args[2], args[2:6], args[-2]
    return tuple(
        t.new_empty(t.shape) if need and t is not None else x.new_empty(0)
        for t, need in zip(inputs, needs, strict=True)
    )


def _is_kept(kept: Tensor, x: Tensor) -> bool:
    """Whether the forward kept a sum; if not, what it normalised is x."""
    return kept.dim() == x.dim() and kept.shape == x.shape


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.dropout_p, ctx.eps, ctx.keep_sum, ctx.backend = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad_out, grad_sum, _grad_mean, _grad_rstd):
    needs = list(ctx.needs_input_grad[:4])
    rest = (None,) * 5
    if not ctx.keep_sum:
        grad_sum = None
    if grad_out is None and grad_sum is None:
        return None, None, None, None, *rest
    found = _add_layer_norm_backward(
        grad_out, grad_sum, *ctx.saved_tensors, ctx.dropout_p, ctx.eps, needs, ctx.backend
    )
    return (*(g if need else None for g, need in zip(found, needs, strict=True)), *rest)


def _setup_double_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:10])
    ctx.dropout_p, ctx.eps, ctx.needs, _ = inputs[10:]
    ctx.set_materialize_grads(False)


def _double_autograd(ctx: Any, *grad_grads: Tensor | None):
    def formula(grad_out, grad_sum, x, residual, weight, bias, rng_state, kept, _mean, _rstd):
        total = kept if _is_kept(kept, x) else x
        statistics = _statistics(total, ctx.eps)
        dtypes = (x.dtype, *(None if t is None else t.dtype for t in (residual, bias)))
        return reference.bwd(
            grad_out, grad_sum, total, weight, *statistics, rng_state, ctx.dropout_p,
            tuple(ctx.needs), *dtypes,
        )  # fmt: skip

    found = differentiate(formula, ctx.saved_tensors, grad_grads)
    return (*found, None, None, None, None)


def _statistics(total: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """mean and rstd again, as functions of the sum, which second derivatives go through."""
    wide = total.to(torch.promote_types(total.dtype, torch.float32)).reshape(-1, total.shape[-1])
    return wide.mean(-1), torch.rsqrt(wide.var(-1, correction=0) + eps)


_add_layer_norm = register_op(
    f"add_layer_norm({_INPUTS}, float dropout_p, float eps, bool keep_sum, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)

_add_layer_norm_backward = register_op(
    f"add_layer_norm_backward(Tensor? grad_out, Tensor? grad_sum, {_INPUTS}, Tensor kept, "
    "Tensor mean, Tensor rstd, float dropout_p, float eps, bool[4] needs, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    setup_context=_setup_double_context,
    backward=_double_autograd,
)
