"""Dropout and autograd as users found them wrong elsewhere, right here on every backend.

flash-attention#166 (a new mask at each replay of a CUDA graph) needs a GPU: not here.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn.testing import Inputs, backends, peers, with_layout
from tests.harness import judge, run_on
from tests.ops.attention_cases import compare

BACKENDS = pytest.mark.parametrize("backend", backends("attention"))
attention = fastattn.scaled_dot_product_attention


@BACKENDS
@pytest.mark.parametrize("way", ["plain", "another draw", "checkpoint"])
def test_xformers_724_gradients_belong_to_the_mask_of_the_forward(backend, way):
    """The mask is recovered from the output for V = I under the same seed."""
    inputs, p, length = Inputs(), 0.3, 24
    tensors = tuple(inputs.normal(2, 2, length, 8) for _ in range(2))
    grad = (inputs.normal(2, 2, length, length),)
    eye = torch.eye(length).expand(2, 2, length, length)

    def attend(query, key, value):
        return run_on(backend, attention, query, key, value, dropout_p=p, is_causal=True)

    torch.manual_seed(5)
    kept = (attend(*tensors, eye) != 0) | torch.ones(length, length).triu(1).bool()

    def ours(*leaves):
        torch.manual_seed(5)
        if way == "checkpoint":
            return (checkpoint(attend, *leaves, use_reentrant=False),)
        out = attend(*leaves)
        if way == "another draw":
            attend(*leaves)
        return (out,)

    def plain(*leaves):
        return peers.attention(*leaves, is_causal=True, keep=kept, dropout_p=p)[:1]

    value = inputs.normal(2, 2, length, length)
    judge(("output", "dq", "dk", "dv"), ours, plain, (*tensors, value), grad,
          sizes=dict.fromkeys(("dq", "dk", "dv"), 20.0))  # fmt: skip


@pytest.mark.parametrize("backend", backends("add_layer_norm"))
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_apex_816_the_gradient_of_the_sum_is_the_mask(backend, p):
    x, residual = Inputs().normal(6, 33).requires_grad_(), Inputs(1).normal(6, 33)
    _, total = run_on(backend, fastattn.add_layer_norm, x, residual, dropout_p=p, return_sum=True)
    (grad,) = torch.autograd.grad(total.sum(), x)
    kept = (total - residual).abs() > 1e-6
    assert kept.any() and not kept.all()
    torch.testing.assert_close(grad, kept / (1 - p))


@BACKENDS
@pytest.mark.parametrize("shape", [(3, 1, 9, 9), (1, 4, 9, 9), (1, 1, 9, 9), (3, 4, 1, 9)], ids=str)
def test_xformers_783_the_gradient_of_a_broadcast_bias(backend, shape):
    inputs = Inputs()
    tensors = [inputs.normal(3, 4, 9, 16) for _ in range(3)]
    _, grads = compare(backend, *tensors, inputs.normal(*shape))
    assert grads[3].shape == shape


@BACKENDS
def test_pytorch_116350_second_derivatives_of_attention(backend):
    inputs = Inputs()
    tensors = [inputs.normal(2, 2, 5, 8).requires_grad_() for _ in range(3)]

    def second(function):
        out = function(*tensors)
        grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)

    found = second(lambda *x: run_on(backend, attention, *x, is_causal=True))
    right = second(lambda *x: peers.attention(*x, is_causal=True)[0])
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", ["add_layer_norm", "softmax", "dropout"])
def test_pytorch_116350_second_derivatives_of_rows(op):
    x = Inputs().normal(4, 9).requires_grad_()
    rng = torch.tensor([1, 2])
    mask = fastattn.dropout(torch.ones(4, 9), 0.5, rng_state=rng)
    ours, right = {
        "add_layer_norm": (lambda x: fastattn.add_layer_norm(x), lambda x: F.layer_norm(x, (9,))),
        "softmax": (lambda x: fastattn.softmax(x), lambda x: torch.softmax(x, -1)),
        "dropout": (lambda x: fastattn.dropout(x, 0.5, rng_state=rng), lambda x: x * mask),
    }[op]

    def second(function):
        (grad,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    torch.testing.assert_close(second(ours), second(right), rtol=1e-4, atol=1e-4)


@BACKENDS
@pytest.mark.parametrize("way", ["expanded", "transposed", "strided"])
def test_flash_attention_355_gradients_of_any_layout(backend, way):
    inputs = Inputs()
    tensors = [inputs.normal(2, 3, 8, 8).requires_grad_() for _ in range(3)]
    out = run_on(backend, attention, *tensors)
    if way == "expanded":
        grad = torch.ones(()).expand_as(out)
    else:
        grad = with_layout(inputs.normal(2, 3, 8, 8), way)
    assert not grad.is_contiguous()
    found = torch.autograd.grad(out, tensors, grad, retain_graph=True)
    right = torch.autograd.grad(out, tensors, grad.contiguous())
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flash_attention_2777_a_last_stride_other_than_one(backend, dtype):
    inputs = Inputs()
    strided = [inputs.normal(2, 2, 17, 24, dtype=dtype, layout="strided") for _ in range(3)]
    assert all(x.stride(-1) == 3 for x in strided)
    compare(backend, *strided)
