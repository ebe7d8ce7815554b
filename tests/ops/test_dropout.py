"""dropout: scaling, layouts and gradients; tests/test_philox.py has its masks bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fastattn
from fastattn.testing import LAYOUTS, Inputs, backends, philox
from tests.harness import DTYPES, GRAD_LAYOUTS, judge, make_grad, run_on

BACKENDS = backends("dropout")
SHAPES = [(3, 5, 17), (), (1,), (9,), (0, 4), (4, 0), (65, 63), (2, 1, 64)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_values_and_gradient(backend, dtype, shape, p):
    check_dropout(backend, dtype, shape, p, "contiguous", "contiguous")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_layout", GRAD_LAYOUTS)
def test_layouts(backend, layout, grad_layout):
    check_dropout(backend, torch.float32, (3, 5, 17), 0.3, layout, grad_layout)


def check_dropout(backend, dtype, shape, p, layout, grad_layout) -> None:
    inputs = Inputs()
    x = inputs.normal(*shape, dtype=dtype, layout=layout)
    grad = make_grad(inputs, shape, dtype, grad_layout)
    rng = inputs.rng_state()
    kept = philox.rowwise_keep(rng, p, shape)

    def ours(x):
        out = run_on(backend, fastattn.dropout, x, p, rng_state=rng)
        assert out.is_contiguous() and out.dtype == dtype
        return (out,)

    def plain(x):
        return (torch.where(kept, x / (1 - p) if p < 1 else x, 0.0),)

    judge(("out", "dx"), ours, plain, (x,), (grad,))


def test_no_dropout_returns_x_itself():
    x = torch.ones(3)
    assert fastattn.dropout(x, 0.0) is x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_dropped_elements_are_zero_whatever_they_were(backend, bad):
    rng = torch.tensor([1, 2])
    kept = philox.rowwise_keep(rng, 0.5, (4, 9))
    out = run_on(backend, fastattn.dropout, torch.full((4, 9), bad), 0.5, rng_state=rng)
    assert not out[~kept].any() and not out[kept].isfinite().any()


@pytest.mark.parametrize("check_gradients", [gradcheck, gradgradcheck], ids=lambda f: f.__name__)
def test_gradients_by_differences(check_gradients):
    x = Inputs().normal(3, 5, dtype=torch.float64).requires_grad_()
    rng = torch.tensor([1, 2])
    assert check_gradients(lambda x: fastattn.dropout(x, 0.4, rng_state=rng), (x,))
