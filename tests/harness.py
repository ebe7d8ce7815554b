"""How tests run a function on a named backend, and how they judge it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import use_backend
from fastattn.testing import Inputs, check_all, peers, why_not
from fastattn.testing.pairwise import label

Tensors = tuple[Tensor | None, ...]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
GRAD_LAYOUTS = ("contiguous", "transposed", "expanded", "sum", "strided")


def named(cases: list[dict], defaults: dict) -> list:
    """Parameters for pytest, each named by its number and what is not the default."""
    return [pytest.param(c, id=f"{i}-{label(c, defaults)}") for i, c in enumerate(cases)]


def run_on(backend: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call on ``backend``; skips the test if the backend itself declines."""
    reason = why_not(backend, function, *args, **kwargs)
    if reason is not None:
        pytest.skip(reason)
    with use_backend(backend):
        return function(*args, **kwargs)


def judge(
    names: tuple[str, ...],
    ours: Callable[..., Tensors],
    plain: Callable[..., Tensors],
    tensors: Tensors,
    grads: Tensors,
    *,
    sizes: dict[str, float] | None = None,
    dtypes: dict[str, torch.dtype] | None = None,
) -> tuple[Tensors, Tensors]:
    """Outputs and gradients of ``ours`` by the pass rule, ``plain`` giving exact answer and peer.

    Args:
        names: of the outputs, then of the gradients of every tensor.
        tensors: what both functions take; all floating ones get gradients.
        grads: of the outputs; None for an output that takes no part.

    Returns:
        (outputs, gradients) of ``ours``.
    """
    exact = peers.gradients(plain, cast(tensors, torch.float64), cast(grads, torch.float64))
    peer = peers.gradients(plain, tensors, grads)
    got = peers.gradients(ours, tensors, grads)
    flat = ((*found[0], *found[1]) for found in (got, exact, peer))
    check_all(names, *flat, sizes=sizes, dtypes=dtypes)
    return got


def make_grad(inputs: Inputs, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
    """A gradient for an output: numbers in a memory ``layout``, or "sum": one 1 expanded."""
    if layout == "sum":
        return torch.ones((), dtype=dtype).expand(shape)
    return inputs.normal(*shape, dtype=dtype, layout=layout)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    """cu_seqlens of packed sequences: int32 [B + 1]."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """The floating ones among ``tensors`` in ``dtype``."""
    return tuple(x.to(dtype) if x is not None and x.is_floating_point() else x for x in tensors)
