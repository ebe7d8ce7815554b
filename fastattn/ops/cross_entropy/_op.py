"""Registration of ``fastattn::linear_cross_entropy``, its backward, and the function around."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._checks import (
    check_device,
    check_floating,
    check_like,
    check_probability,
    describe,
)
from fastattn._dispatch import register_backends, select
from fastattn._library import register_op, wants_grad
from fastattn.ops.cross_entropy.reference import CrossEntropyConfig

register_backends(
    "linear_cross_entropy",
    {
        "cpu": "fastattn.ops.cross_entropy._cpu",
        "cuda": "fastattn.ops.cross_entropy._cuda",
        "triton": "fastattn.ops.cross_entropy._triton",
        "torch": "fastattn.ops.cross_entropy._torch",
        "reference": "fastattn.ops.cross_entropy.reference",
        "emulator": "fastattn.ops.cross_entropy._emulator",
    },
)

_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? class_weight, Tensor target"
_CONFIG = "float label_smoothing, bool exclusive, int ignore_index, str reduction"
_TENSORS = 5


def linear_cross_entropy(
    hidden: Tensor,  # [..., D]
    weight: Tensor,
    target: Tensor,  # [...]
    bias: Tensor | None,
    class_weight: Tensor | None,
    label_smoothing: float,
    smoothing: str,
    ignore_index: int,
    reduction: str,
    return_nll: bool,
    backend: str,
) -> Tensor | tuple[Tensor, Tensor]:
    """The op on flattened tokens, its gradients computed in the forward only where wanted."""
    _check_words(smoothing, reduction)
    check_floating("hidden", hidden)
    if not isinstance(target, Tensor):
        raise TypeError(f"target is {describe(target)}; int64 class indices are accepted")
    if hidden.dim() < 1 or hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"target is {describe(target)} but hidden is {describe(hidden)}; "
            "hidden's shape without its last dimension is accepted"
        )
    trains = torch.is_grad_enabled()
    needs = [trains and wants_grad(t) for t in (hidden, weight, bias)]
    loss, nll, *_ = _linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        class_weight,
        target.reshape(-1),
        label_smoothing,
        smoothing == "exclusive",
        ignore_index,
        reduction,
        needs,
        backend,
    )
    if reduction == "none":
        loss, nll = loss.view(target.shape), nll.view(target.shape)
    return (loss, nll.detach()) if return_nll else loss


def _check_words(smoothing: str, reduction: str) -> None:
    if smoothing not in ("uniform", "exclusive"):
        raise ValueError(f"smoothing is {smoothing!r}; 'uniform' or 'exclusive' is accepted")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; 'mean', 'sum' or 'none' is accepted")


def _check_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    target: Tensor,
    label_smoothing: float,
) -> None:
    check_floating("hidden", hidden)
    check_like("weight", weight, "hidden", hidden)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] < 1:
        raise ValueError(
            f"weight is {describe(weight)} but hidden is {describe(hidden)}; [V, D] with at least "
            "one class is accepted"
        )
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        if vector is None:
            continue
        check_floating(name, vector)
        check_device(name, vector, "hidden", hidden)
        if vector.dim() != 1 or vector.shape[0] != weight.shape[0]:
            raise ValueError(f"{name} is {describe(vector)}; [V] = ({len(weight)},) is accepted")
    if target.dtype != torch.int64:
        raise TypeError(f"target is {describe(target)}; int64 class indices are accepted")
    check_device("target", target, "hidden", hidden)
    check_probability("label_smoothing", label_smoothing)


def _check_target_range(target: Tensor, classes: int, ignore_index: int) -> None:
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if wrong.any():
        raise IndexError(
            f"target holds {int(target[wrong][0])}; classes 0 to {classes - 1} and ignore_index "
            f"{ignore_index} are accepted"
        )


def _forward(*args: Any) -> tuple[Tensor, ...]:
    inputs, cfg = args[:_TENSORS], CrossEntropyConfig(*args[_TENSORS:-2])
    needs, backend = tuple(args[-2]), args[-1]
    _check_linear_cross_entropy(*inputs, cfg.label_smoothing)
    hidden, weight, *_, target = inputs
    if target.device.type == "cpu":
        _check_target_range(target, len(weight), cfg.ignore_index)
    arguments = (*inputs, cfg, needs)
    return select("linear_cross_entropy", hidden.device, backend, *arguments).fwd(*arguments)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    inputs, cfg, needs = args[:_TENSORS], CrossEntropyConfig(*args[_TENSORS:-2]), args[-2]
    _check_linear_cross_entropy(*inputs, cfg.label_smoothing)
    hidden, weight, bias, _, target = inputs
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    per_token = cfg.reduction == "none"
    loss = hidden.new_empty(target.shape if per_token else (), dtype=dtype)
    grads = [
        t.new_empty(t.shape) if need and t is not None and not per_token else hidden.new_empty(0)
        for t, need in zip((hidden, weight, bias), needs, strict=True)
    ]
    return loss, torch.empty_like(loss), hidden.new_empty(target.shape, dtype=dtype), *grads


def _backward(*args: Any) -> tuple[Tensor, ...]:
    grad_loss, *inputs, lse = args[: _TENSORS + 2]
    cfg = CrossEntropyConfig(*args[_TENSORS + 2 : -2])
    needs, backend = tuple(args[-2]), args[-1]
    hidden = inputs[0]
    chosen = select("linear_cross_entropy", hidden.device, backend, *inputs, cfg, needs)
    found = chosen.bwd(grad_loss, *inputs, lse, cfg, needs)
    return tuple(hidden.new_empty(0) if g is None else g for g in found)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    hidden, weight, bias = args[1:4]
    return tuple(
        t.new_empty(t.shape) if need and t is not None else hidden.new_empty(0)
        for t, need in zip((hidden, weight, bias), args[-2], strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, lse, *grads = output
    *ctx.config, _needs, ctx.backend = inputs[_TENSORS:]
    ctx.per_token = inputs[-3] == "none"
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*((*inputs[:_TENSORS], lse) if ctx.per_token else grads))
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad_loss, _grad_nll, grad_lse, *grads_of_grads):
    if grad_lse is not None or any(g is not None for g in grads_of_grads):
        raise RuntimeError("linear_cross_entropy has no second derivative; take it from logits")
    needs = list(ctx.needs_input_grad[:3])
    rest = (None,) * (_TENSORS - 3 + len(ctx.config) + 2)
    if grad_loss is None:
        return None, None, None, *rest
    if ctx.per_token:
        found = _linear_cross_entropy_backward(
            grad_loss, *ctx.saved_tensors, *ctx.config, needs, ctx.backend
        )
    else:
        found = [
            _scaled(g, grad_loss) if need else None
            for g, need in zip(ctx.saved_tensors, needs, strict=True)
        ]
    return (*(g if need else None for g, need in zip(found, needs, strict=True)), *rest)


def _scaled(grad: Tensor, grad_loss: Tensor) -> Tensor:
    """grad * grad_loss; grad itself where grad_loss is 1, which most calls of backward() give."""
    is_plain = type(grad_loss) is Tensor and grad_loss.is_cpu and not grad_loss.requires_grad
    is_plain = is_plain and torch._C._has_storage(grad_loss)  # vmap's tensors have none
    if is_plain and not torch.compiler.is_compiling() and grad_loss.item() == 1.0:
        return grad
    return (grad * grad_loss).to(grad.dtype)


def _setup_double_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.arguments = len(inputs)


def _double_autograd(ctx: Any, *_: Tensor):
    raise RuntimeError("linear_cross_entropy has no second derivative; take it from logits")


def _flops(hidden: Tensor, weight: Tensor, *rest: Any) -> int:
    """The logits, and the gradients that are computed with them."""
    needs = rest[-2]
    return 2 * hidden.shape[0] * weight.numel() * (1 + needs[0] + needs[1])


_linear_cross_entropy = register_op(
    f"linear_cross_entropy({_INPUTS}, {_CONFIG}, bool[3] needs, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
    flops=_flops,
)

_linear_cross_entropy_backward = register_op(
    f"linear_cross_entropy_backward(Tensor grad_loss, {_INPUTS}, Tensor lse, {_CONFIG}, "
    "bool[3] needs, str backend) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    setup_context=_setup_double_context,
    backward=_double_autograd,
    flops=lambda _grad_loss, *args: _flops(*args),
)
