"""Under autocast every function gives the dtype that torch's own gives, on that device.

GPUs are asked through fake tensors, which need none: only dtypes are compared there.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fastattn
from fastattn.testing import Inputs, check
from tests.harness import cast
from tests.ops.calls import CALLS, RecordOps, forward_and_backward

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, *HALVES)


def attention(x: Tensor, of: str) -> Tensor:
    ours = fastattn.scaled_dot_product_attention
    function = F.scaled_dot_product_attention if of == "torch" else ours
    return function(x, x, x)


def layer_norm(x: Tensor, of: str) -> Tensor:
    parameters = torch.ones(8, dtype=x.dtype, device=x.device), None
    if of == "torch":
        return F.layer_norm(x, (8,), *parameters)
    return fastattn.add_layer_norm(x, None, *parameters)


def softmax(x: Tensor, of: str) -> Tensor:
    return torch.softmax(x, -1) if of == "torch" else fastattn.softmax(x)


def cross_entropy(x: Tensor, of: str) -> Tensor:
    hidden, target = x.reshape(-1, 8), torch.zeros(x.numel() // 8, dtype=torch.int64).to(x.device)
    if of == "torch":
        return F.cross_entropy(F.linear(hidden, hidden), target)
    return fastattn.linear_cross_entropy(hidden, hidden, target)


def dropout(x: Tensor, of: str) -> Tensor:
    return F.dropout(x, 0.5) if of == "torch" else fastattn.dropout(x, 0.5)


FUNCTIONS = (attention, layer_norm, softmax, cross_entropy, dropout)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("autocast", HALVES, ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dtypes_are_torchs(function, dtype, autocast, device, autocast_on):
    with FakeTensorMode():
        x = torch.empty(2, 3, 8, 8, dtype=dtype, device=device)
        with autocast_on(device, autocast):
            found, right = function(x, "ours"), function(x, "torch")
    assert found.dtype == right.dtype


@pytest.fixture
def autocast_on():
    """torch.autocast itself turns "cuda" off where there is no GPU."""

    @contextmanager
    def switched(device: str, dtype: torch.dtype):
        before = torch.get_autocast_dtype(device)
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, dtype)
        try:
            yield
        finally:
            torch.set_autocast_enabled(device, False)
            torch.set_autocast_dtype(device, before)

    return switched


@pytest.mark.parametrize("function", FUNCTIONS[:4], ids=lambda f: f.__name__)
def test_gradients_come_in_the_inputs_dtype(function):
    x = Inputs().normal(2, 3, 8, 8).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(x, "ours")
    (grad,) = torch.autograd.grad(out.float().square().sum(), x)
    assert grad.dtype == torch.float32 and grad.isfinite().all() and grad.any()


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_mask_of_any_floating_dtype_fits(mask_dtype):
    inputs = Inputs()
    query, key, value = (inputs.normal(2, 2, 5, 8) for _ in range(3))
    mask = inputs.normal(1, 2, 5, 5, dtype=mask_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fastattn.scaled_dot_product_attention(query, key, value, mask)
    halves = [x.bfloat16().double() for x in (query, key, value)]
    exact = F.scaled_dot_product_attention(*halves, mask.double())
    check("output", out, exact)


@pytest.mark.parametrize("autocast", HALVES, ids=str)
def test_a_float32_mask_keeps_finfo_min(autocast):
    """Rounded to half it would be -inf, and the row one that sees nothing."""
    value = Inputs().normal(1, 1, 4, 8)
    mask = torch.full((4, 4), torch.finfo(torch.float32).min)
    with torch.autocast("cpu", dtype=autocast):
        out = fastattn.scaled_dot_product_attention(value, value, value, mask)
    rounded = value.to(autocast).double()
    check("output", out, rounded.mean(2, keepdim=True).expand_as(value))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dispatched", [False, True])
def test_nothing_is_rounded_within_an_op(name, dispatched):
    """An op on half inputs gives under autocast, backward included, what it gives without."""
    call = CALLS[name]
    halves = cast(call.tensors, torch.bfloat16)
    right = forward_and_backward(call, *halves)
    with torch.autocast("cpu", dtype=torch.bfloat16), RecordOps() if dispatched else nullcontext():
        found = forward_and_backward(call, *halves)
    for one, other in zip((*found[0], *found[1]), (*right[0], *right[1]), strict=True):
        assert torch.equal(one, other)
