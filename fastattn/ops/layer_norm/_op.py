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
        "cuda": "fastattn.ops.layer_norm._cuda",
        "triton": "fastattn.ops.layer_norm._triton",
        "torch": "fastattn.ops.layer_norm._torch",
        "reference": "fastattn.ops.layer_norm.reference",
        "emulator": "fastattn.ops.layer_norm._emulator",
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
    total: Tensor,
    weight: Tensor | None,
    rng_state: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    eps: float,
    needs: list[bool],
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    backend: str,
) -> tuple[Tensor, ...]:
    x, residual = _stand_in(total, x_dtype), _stand_in(total, residual_dtype)
    bias = _stand_in(mean if weight is None else weight, bias_dtype)
    arguments = (x, residual, weight, bias, rng_state, dropout_p, eps, True)
    chosen = select("add_layer_norm", total.device, backend, *arguments)
    if total.dtype != mean.dtype and (residual_dtype is not None or dropout_p > 0):
        # The forward normalised the sum before it was rounded to half: a row that is constant but
        # for its mean's last bits would get gradients of any size.
        *_, mean, rstd = chosen.fwd(total, None, None, None, None, 0.0, eps, False)
    found = chosen.bwd(
        grad_out,
        grad_sum,
        total,
        weight,
        mean,
        rstd,
        rng_state,
        dropout_p,
        tuple(needs),
        x_dtype,
        residual_dtype,
        bias_dtype,
    )
    return tuple(total.new_empty(0) if g is None else g for g in found)


def _stand_in(like: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """Something of ``like``'s shape and device for ``why_not`` to look at, in ``dtype``."""
    if dtype is None or dtype == like.dtype:
        return None if dtype is None else like
    return like.new_empty((), dtype=dtype).expand(like.shape)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    total, weight = args[2:4]
    needs, x_dtype, residual_dtype, bias_dtype = args[-5:-1]
    shapes = (total.shape, total.shape, total.shape[-1:], total.shape[-1:])
    dtypes = (x_dtype, residual_dtype, None if weight is None else weight.dtype, bias_dtype)
    return tuple(
        total.new_empty(shape, dtype=dtype) if need and dtype is not None else total.new_empty(0)
        for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, rng_state, ctx.dropout_p, ctx.eps, keep_sum, ctx.backend = inputs
    ctx.dtypes = (x.dtype, *(None if t is None else t.dtype for t in (residual, bias)))
    ctx.keep_sum = keep_sum
    source = (output[1], None) if keep_sum else (x, residual)
    ctx.save_for_backward(*source, weight, rng_state, *output[2:])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad_out, grad_sum, _grad_mean, _grad_rstd):
    rest = (None,) * 5
    if not ctx.keep_sum:
        grad_sum = None
    if grad_out is None and grad_sum is None:
        return None, None, None, None, *rest
    total, residual, weight, rng_state, mean, rstd = ctx.saved_tensors
    if not ctx.keep_sum:
        total = reference.residual_sum(total, residual, rng_state, ctx.dropout_p)
    needs = list(ctx.needs_input_grad[:4])
    x_dtype, residual_dtype, _ = ctx.dtypes
    shares = ctx.dropout_p == 0 and x_dtype == residual_dtype and needs[0] and needs[1]
    found = _add_layer_norm_backward(
        grad_out,
        grad_sum,
        total,
        weight,
        rng_state,
        mean,
        rstd,
        ctx.dropout_p,
        ctx.eps,
        [needs[0], needs[1] and not shares, *needs[2:]],
        *ctx.dtypes,
        ctx.backend,
    )
    grads = [g if need else None for g, need in zip(found, needs, strict=True)]
    if shares:
        grads[1] = grads[0]
    return (*grads, *rest)


def _setup_double_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.dropout_p, ctx.eps, ctx.needs, *ctx.dtypes, _ = inputs[7:]
    ctx.set_materialize_grads(False)


def _double_autograd(ctx: Any, *grad_grads: Tensor | None):
    def formula(grad_out, grad_sum, total, weight, rng_state, _mean, _rstd):
        return reference.bwd(
            grad_out,
            grad_sum,
            total,
            weight,
            *_statistics(total, ctx.eps),
            rng_state,
            ctx.dropout_p,
            tuple(ctx.needs),
            *ctx.dtypes,
        )

    found = differentiate(formula, ctx.saved_tensors, grad_grads)
    return (*found, *(None,) * 7)


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
    "add_layer_norm_backward(Tensor? grad_out, Tensor? grad_sum, Tensor total, Tensor? weight, "
    "Tensor? rng_state, Tensor mean, Tensor rstd, float dropout_p, float eps, bool[4] needs, "
    "ScalarType x_dtype, ScalarType? residual_dtype, ScalarType? bias_dtype, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    setup_context=_setup_double_context,
    backward=_double_autograd,
)
