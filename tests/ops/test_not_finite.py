"""A NaN or an infinity shows where it belongs, and nowhere else.

torch's fused attention on CPUs (2.13) answers short rows of NaN with zeros; so does its backend.
"""

from __future__ import annotations

import pytest
import torch

import fastattn
from fastattn.testing import Inputs, backends
from tests.harness import offsets, run_on

NAN, INF = float("nan"), float("inf")
BAD = pytest.mark.parametrize("bad", [NAN, INF, -INF])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def assert_only_row(found: torch.Tensor, clean: torch.Tensor, row: int) -> None:
    """``row`` (of the second last dimension) is NaN, every other as without it."""
    others = [i for i in range(found.shape[-2]) if i != row]
    assert found[..., row, :].isnan().all()
    assert torch.equal(found[..., others, :], clean[..., others, :])


@pytest.mark.parametrize("backend", [b for b in backends("attention") if b != "torch"])
@DTYPES
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": 2}], ids=str)
@pytest.mark.parametrize("length", [9, 70])
def test_a_query_of_nan(backend, dtype, options, length):
    inputs = Inputs()
    query, key, value = (inputs.normal(1, 2, length, 16, dtype=dtype) for _ in range(3))
    clean = run_on(backend, fastattn.scaled_dot_product_attention, query, key, value, **options)
    query[:, :, 4, 3] = NAN
    found = run_on(backend, fastattn.scaled_dot_product_attention, query, key, value, **options)
    assert_only_row(found, clean, 4)


@pytest.mark.parametrize("backend", backends("attention"))
@pytest.mark.parametrize("where", [1, 2])
def test_a_visible_key_or_value_of_nan_is_not_hidden(backend, where):
    tensors = [Inputs(i).normal(1, 1, 9, 16) for i in range(3)]
    tensors[where][0, 0, 5] = NAN
    out = run_on(backend, fastattn.scaled_dot_product_attention, *tensors)
    assert out.isnan().all()


@pytest.mark.parametrize("backend", backends("varlen_attention"))
def test_a_sequence_of_nan_stays_in_its_place(backend):
    x, ends = Inputs().normal(12, 2, 8), offsets((5, 4, 3))
    clean = run_on(backend, fastattn.varlen_attention, x, x, x, ends, ends)
    x = x.clone()
    x[5:9] = NAN
    found = run_on(backend, fastattn.varlen_attention, x, x, x, ends, ends)
    assert found[5:9].isnan().all()
    assert torch.equal(found[:5], clean[:5]) and torch.equal(found[9:], clean[9:])


@pytest.mark.parametrize("backend", backends("add_layer_norm"))
@DTYPES
@BAD
def test_a_row_for_layer_norm(backend, dtype, bad):
    inputs = Inputs()
    x, residual = (inputs.normal(6, 33, dtype=dtype) for _ in range(2))
    clean = run_on(backend, fastattn.add_layer_norm, x, residual)
    x[2, 30] = bad
    assert_only_row(run_on(backend, fastattn.add_layer_norm, x, residual), clean, 2)


@pytest.mark.parametrize("backend", backends("softmax"))
@DTYPES
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("column", [0, 16, 32])
def test_a_row_for_softmax(backend, dtype, bad, column):
    x = Inputs().normal(6, 33, dtype=dtype)
    clean = run_on(backend, fastattn.softmax, x)
    x[2, column] = bad
    found = run_on(backend, fastattn.softmax, x)
    right = torch.softmax(x[2].double(), -1).isnan()
    assert torch.equal(found[2].isnan(), right) and right.any()
    assert torch.equal(found[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("backend", backends("linear_cross_entropy"))
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_token_for_cross_entropy(backend, reduction):
    hidden, weight = Inputs().normal(6, 8), Inputs(1).normal(11, 8)
    target = torch.arange(6)
    options = {"reduction": reduction}
    clean = run_on(backend, fastattn.linear_cross_entropy, hidden, weight, target, **options)
    hidden[2, 3] = NAN
    found = run_on(backend, fastattn.linear_cross_entropy, hidden, weight, target, **options)
    if reduction == "mean":
        assert found.isnan()
    else:
        assert found[2].isnan() and torch.equal(found[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("backend", backends("linear_cross_entropy"))
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_an_ignored_token_of_nan_counts_for_nothing(backend, eps):
    """Neither in the loss nor in its own gradient; that of the weight is torch's to differ."""
    hidden, weight = Inputs().normal(6, 8), Inputs(1).normal(11, 8)
    target = torch.tensor([0, 1, -100, 3, 4, 5])
    options = {"reduction": "sum", "label_smoothing": eps}
    clean = run_on(backend, fastattn.linear_cross_entropy, hidden, weight, target, **options)
    hidden[2] = NAN
    hidden.requires_grad_()
    found = run_on(backend, fastattn.linear_cross_entropy, hidden, weight, target, **options)
    (grad,) = torch.autograd.grad(found, hidden)
    torch.testing.assert_close(found, clean)
    assert grad.isfinite().all() and not grad[2].any()
