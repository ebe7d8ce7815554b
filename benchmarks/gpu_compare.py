"""Every op on every backend of a device against its float64 reference, on the same numbers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastattn
from fastattn.testing import Inputs, backends, peers, why_not

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Call(NamedTuple):
    """``function(*tensors)`` gives tensors; the floating ones get gradients."""

    op: str
    name: str
    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]


def calls(dtype: torch.dtype, device: str) -> Iterator[Call]:
    """Shapes off every tile, what no two backends may see differently."""
    inputs = Inputs(device=device)
    rng = torch.tensor([3, 4], device=device)
    for dim, (q_len, kv_len) in itertools.product((64, 128), ((200, 200), (1, 1000))):
        q = inputs.normal(2, 4, q_len, dim, dtype=dtype)
        k, v = (inputs.normal(2, 2, kv_len, dim, dtype=dtype) for _ in range(2))
        padding = torch.arange(kv_len, device=device).expand(2, -1) >= kv_len - 37
        for name, options in {
            "causal": {"is_causal": True},
            "padded, dropout": {"key_padding_mask": padding, "dropout_p": 0.1, "rng_state": rng},
            "window": {"window": (60, 5), "causal_alignment": "bottom_right"},
        }.items():

            def attend(*x: Tensor, options: dict = options) -> Any:
                return fastattn.scaled_dot_product_attention(*x, enable_gqa=True, **options)

            yield Call("attention", f"{name}, {q_len} x {kv_len} x {dim}", attend, (q, k, v))
    x, residual = (inputs.normal(130, 515, dtype=dtype) for _ in range(2))
    weight, bias = (inputs.normal(515, dtype=dtype) for _ in range(2))

    def normalise(*x: Tensor) -> Any:
        return fastattn.add_layer_norm(*x, dropout_p=0.1, rng_state=rng)

    yield Call("add_layer_norm", "dropout", normalise, (x, residual, weight, bias))
    yield Call("softmax", "plain", fastattn.softmax, (x,))
    yield Call("dropout", "0.1", lambda x: fastattn.dropout(x, 0.1, rng_state=rng), (x,))
    table = inputs.normal(1000, 64, dtype=dtype)
    target = inputs.integers(0, 1000, 130)

    def entropy(hidden: Tensor, table: Tensor) -> Any:
        return fastattn.linear_cross_entropy(hidden, table, target, label_smoothing=0.1)

    yield Call("linear_cross_entropy", "smoothed", entropy, (x[:, :64].contiguous(), table))


def compare_all(device: str, seconds: float) -> list[dict[str, Any]]:
    """A row for every call, dtype and backend: the errors of result and gradients, relative to
    their largest number (or to 1, where that is smaller), or why the backend declines."""
    rows, end = [], time.monotonic() + seconds
    for dtype in DTYPES:
        for call in calls(dtype, device):
            if time.monotonic() > end:
                rows.append({"op": call.op, "declined": "no time left"})
                return rows
            exact = _run("reference", call, tuple(x.double() for x in call.tensors))
            for backend in (name for name in backends(call.op) if name != "emulator"):
                row = {"op": call.op, "call": call.name, "dtype": str(dtype), "backend": backend}
                reason = why_not(backend, call.function, *call.tensors)
                if reason is not None:
                    rows.append(row | {"declined": reason})
                    continue
                found = _run(backend, call, call.tensors)
                rows.append(row | {"errors": [_error(*p) for p in zip(found, exact, strict=True)]})
    return rows


def _run(backend: str, call: Call, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with fastattn.use_backend(backend), torch.no_grad():
        shape = call.function(*tensors)
    grad = Inputs(9, tensors[0].device).normal(*shape.shape, dtype=torch.float32).to(shape.dtype)
    with fastattn.use_backend(backend):
        outputs, grads = peers.gradients(lambda *x: (call.function(*x),), tensors, (grad,))
    return (*outputs, *(g for g in grads if g is not None))


def _error(found: Tensor, exact: Tensor) -> float:
    size = max(1.0, exact.abs().max().item())
    return (found.double() - exact).abs().max().item() / size
