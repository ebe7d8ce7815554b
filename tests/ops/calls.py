"""One call of every public function that uses all it has, for tests of how ops are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn.testing import Inputs

RNG = torch.tensor([3, 4])


class Call(NamedTuple):
    """``function(*tensors)``; the floating ones get gradients."""

    op: str
    function: Callable[..., Any]
    tensors: tuple[Tensor | None, ...]


def make_calls(batch: int = 3, length: int = 5) -> dict[str, Call]:
    """By name. The plainer of two calls of an op is one that torch's own backend takes.

    No two sizes are equal, which torch.compile would take for a rule.
    """
    inputs, heads, dim = Inputs(), 2, 8
    query, key, value = (inputs.normal(batch, heads, length, dim) for _ in range(3))
    mask = inputs.normal(1, heads, length, length)
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[:, -1] = True
    packed = tuple(inputs.normal(batch * length, heads, dim) for _ in range(3))
    ends = torch.arange(batch + 1, dtype=torch.int32) * length
    x, residual = inputs.normal(batch, length, dim), inputs.normal(batch, length, dim)
    weight, bias = inputs.normal(dim), inputs.normal(dim)
    table, target = inputs.normal(11, dim), inputs.integers(0, 11, batch, length)

    def attend(query, key, value, mask, padding):
        return fastattn.scaled_dot_product_attention(
            query, key, value, mask, 0.3, True, key_padding_mask=padding, window=3,
            causal_alignment="bottom_right", return_lse=True, return_weights=True, rng_state=RNG,
        )  # fmt: skip

    grouped = (
        *(inputs.normal(batch, h, length, d, dtype=torch.bfloat16)
          for h, d in ((4, dim), (2, dim), (2, 6))),
        inputs.normal(length, length),
    )  # fmt: skip

    def attend_grouped(query, key, value, mask):
        return fastattn.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)

    def attend_packed(query, key, value, ends):
        return fastattn.varlen_attention(
            query, key, value, ends, ends, dropout_p=0.3, is_causal=True, return_lse=True,
            rng_state=RNG,
        )[:2]  # fmt: skip

    def normalise(x, residual, weight, bias):
        return fastattn.add_layer_norm(
            x, residual, weight, bias, dropout_p=0.3, return_sum=True, rng_state=RNG
        )

    def entropy(reduction):
        return lambda hidden, weight, bias, target: fastattn.linear_cross_entropy(
            hidden, weight, target, bias=bias, label_smoothing=0.1, reduction=reduction
        )

    return {
        "attention": Call("attention", attend, (query, key, value, mask, padding)),
        "attention-plain": Call(
            "attention", fastattn.scaled_dot_product_attention, (query, key, value)
        ),
        "attention-mixed": Call("attention", attend_grouped, grouped),
        "varlen": Call("varlen_attention", attend_packed, (*packed, ends)),
        "layer-norm": Call("add_layer_norm", normalise, (x, residual, weight, bias)),
        "layer-norm-mixed": Call(
            "add_layer_norm", normalise, (x.bfloat16(), residual, weight, bias.bfloat16())
        ),
        "layer-norm-plain": Call(
            "add_layer_norm", lambda x, w, b: fastattn.add_layer_norm(x, None, w, b),
            (x, weight, bias),
        ),
        "softmax": Call(
            "softmax", lambda x, mask: fastattn.softmax(x, mask=mask, is_causal=True, scale=0.5),
            (query @ key.mT, mask),
        ),
        "softmax-plain": Call("softmax", fastattn.softmax, (x,)),
        "cross-entropy": Call(
            "linear_cross_entropy", entropy("mean"), (x, table, inputs.normal(11), target)
        ),
        "cross-entropy-none": Call(
            "linear_cross_entropy", entropy("none"), (x, table, inputs.normal(11), target)
        ),
        "dropout": Call("dropout", lambda x: fastattn.dropout(x, 0.3, rng_state=RNG), (x,)),
    }  # fmt: skip


CALLS = make_calls()


def forward_and_backward(call: Call, *tensors: Tensor | None) -> tuple[tuple, tuple]:
    """(outputs, gradients of the floating tensors) for ones as gradients of every output."""
    leaves = [
        x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        if x is not None and x.is_floating_point() else x
        for x in tensors
    ]  # fmt: skip
    outputs = call.function(*leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs])
    return outputs, grads


class RecordOps(TorchDispatchMode):
    """Remembers every fastattn op that is called, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastattn":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def record_ops(call: Call) -> list[tuple[Any, tuple]]:
    """(op, arguments) of the forward and the backward op of ``call``."""
    with RecordOps() as recorded:
        forward_and_backward(call, *call.tensors)
    return recorded.calls


def described(x: Tensor) -> tuple:
    """Shape, strides as far as they matter, dtype."""
    strides = tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)
    return tuple(x.shape), strides if x.numel() else (), x.dtype
