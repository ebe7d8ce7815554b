"""LayerNorm, softmax and cross entropy as users found them wrong elsewhere, right here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fastattn
from fastattn.testing import Inputs, backends, peers
from tests.harness import judge, run_on

NORM = pytest.mark.parametrize("backend", backends("add_layer_norm"))
SOFTMAX = pytest.mark.parametrize("backend", backends("softmax"))
ENTROPY = pytest.mark.parametrize("backend", backends("linear_cross_entropy"))


@NORM
@pytest.mark.parametrize("columns", [4, 5, 31, 64, 1000])
def test_pytorch_51102_rows_far_from_zero(backend, columns):
    x = Inputs().normal(5, columns) + 2000
    out = run_on(backend, fastattn.add_layer_norm, x)
    exact = peers.add_layer_norm(x.double())[0]
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-3)


@NORM
@pytest.mark.parametrize("rows", [16, pytest.param(1024, marks=pytest.mark.slow)])
def test_pytorch_51102_a_small_variance_around_100(backend, rows):
    """Variance 1e-4 at mean 100: E[x^2] - E[x]^2 in float32 would have no digit of it."""
    x = Inputs().normal(rows, 32768) * 0.01 + 100
    out = run_on(backend, fastattn.add_layer_norm, x, eps=0.0)
    variance = (x.double().std(-1, correction=0) / out.double().std(-1, correction=0)).square()
    torch.testing.assert_close(variance, torch.full_like(variance, 1e-4), rtol=0.05, atol=0)
    torch.testing.assert_close(out.double().std(-1), torch.ones(rows).double(), rtol=1e-3, atol=0)


@NORM
def test_apex_411_65536_rows(backend):
    x = Inputs().normal(65536, 64).requires_grad_()
    out = run_on(backend, fastattn.add_layer_norm, x)
    right = F.layer_norm(x, (64,))
    torch.testing.assert_close(out, right)
    grad = Inputs(1).normal(65536, 64)
    torch.testing.assert_close(
        torch.autograd.grad(out, x, grad), torch.autograd.grad(right, x, grad)
    )


@NORM
def test_apex_403_backward_without_weight_and_bias(backend):
    inputs = Inputs()
    judge(
        ("out", "dx"),
        lambda x: (run_on(backend, fastattn.add_layer_norm, x),),
        lambda x: peers.add_layer_norm(x)[:1],
        (inputs.normal(7, 33),),
        (inputs.normal(7, 33),),
        sizes={"dx": 10.0},
    )


@NORM
def test_liger_950_the_weight_gradient_of_4096_rows_is_summed_in_float32(backend):
    inputs = Inputs()
    tensors = inputs.normal(4096, 1024), torch.ones(1024), torch.ones(1024)
    tensors = [t.bfloat16().requires_grad_() for t in tensors]
    grad = inputs.normal(4096, 1024, dtype=torch.bfloat16)
    x, weight, bias = tensors
    out = run_on(backend, fastattn.add_layer_norm, x, None, weight, bias)
    found = torch.autograd.grad(out, (weight, bias), grad)
    wide = x.detach().double()
    normal = F.layer_norm(wide, (1024,))
    for got, exact in zip(found, ((grad * normal).sum(0), grad.double().sum(0)), strict=True):
        # within the one rounding to bfloat16, and float32's own error in 4096 terms
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3)


@NORM
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
def test_pytorch_28614_no_rows(backend, shape):
    x, weight, bias = torch.zeros(shape), torch.ones(8), torch.ones(8)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    out = run_on(backend, fastattn.add_layer_norm, x, None, weight, bias)
    assert out.shape == shape
    grads = torch.autograd.grad(out.sum(), leaves)
    assert grads[0].shape == shape
    assert all(torch.equal(g, torch.zeros(8)) for g in grads[1:])


@SOFTMAX
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_megatron_132_masked_softmax_of_every_width(backend, dtype):
    inputs = Inputs()
    for width in range(1, 131):
        x, mask = inputs.normal(3, width, dtype=dtype), inputs.bools(3, width, true=0.7)
        mask[:, width // 2] = True
        out = run_on(backend, fastattn.softmax, x, mask=mask)
        right = torch.softmax(x.double().masked_fill(~mask, -torch.inf), -1)
        torch.testing.assert_close(out.double(), right, rtol=torch.finfo(dtype).eps * 4, atol=1e-7)


@pytest.mark.parametrize("name", ["add_layer_norm", "softmax", "dropout", "attention"])
def test_apex_1430_the_backward_leaves_its_argument_alone(name):
    x = Inputs().normal(1, 2, 6, 8).requires_grad_()
    function = {
        "add_layer_norm": lambda x: fastattn.add_layer_norm(x, x),
        "softmax": fastattn.softmax,
        "dropout": lambda x: fastattn.dropout(x, 0.5),
        "attention": lambda x: fastattn.scaled_dot_product_attention(x, x, x),
    }[name]
    out, grad = function(x), Inputs(1).normal(1, 2, 6, 8)
    before = grad.clone()
    first, second = (torch.autograd.grad(out, x, grad, retain_graph=True) for _ in range(2))
    assert torch.equal(grad, before) and torch.equal(first[0], second[0])


@SOFTMAX
def test_pytorch_38839_scores_of_minus_ten_million(backend):
    x = Inputs().uniform(4, 3) - 1e7
    shares = run_on(backend, fastattn.softmax, x)
    torch.testing.assert_close(shares, torch.softmax(x.double(), -1).float())


@ENTROPY
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_pytorch_38839_logits_of_minus_ten_million(backend, reduction):
    inputs = Inputs()
    hidden, weight = torch.zeros(4, 2, requires_grad=True), inputs.normal(3, 2)
    bias, target = inputs.uniform(3) - 1e7, inputs.integers(0, 3, 4)
    loss = run_on(backend, fastattn.linear_cross_entropy, hidden, weight, target, bias=bias,
                  reduction=reduction)  # fmt: skip
    logits = F.linear(hidden, weight, bias)
    right = F.cross_entropy(logits.double(), target, reduction=reduction)
    assert loss.isfinite().all()
    torch.testing.assert_close(loss, right.float(), rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(x.sum(), hidden)[0] for x in (loss, right)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@ENTROPY
def test_liger_968_no_reduction_with_weights_per_token(backend):
    inputs = Inputs()
    hidden, weight = inputs.normal(2, 4, 8).requires_grad_(), inputs.normal(15, 8).requires_grad_()
    target, per_token = inputs.integers(0, 15, 2, 4), inputs.uniform(2, 4)
    target[0, 1], target[1, 3] = -100, -100
    loss = run_on(backend, fastattn.linear_cross_entropy, hidden, weight, target,
                  reduction="none")  # fmt: skip
    logits = (hidden @ weight.T).flatten(0, 1)
    right = F.cross_entropy(logits, target.flatten(), reduction="none").view(2, 4)
    torch.testing.assert_close(loss, right)
    found, expected = (
        torch.autograd.grad((x * per_token).sum(), (hidden, weight)) for x in (loss, right)
    )
    torch.testing.assert_close(found, expected)


@ENTROPY
def test_liger_243_label_smoothing_is_applied(backend):
    inputs = Inputs()
    hidden, weight, target = inputs.normal(9, 8), inputs.normal(15, 8), inputs.integers(0, 15, 9)
    plain, smooth = (
        run_on(backend, fastattn.linear_cross_entropy, hidden, weight, target, label_smoothing=eps)
        for eps in (0.0, 0.1)
    )
    right = F.cross_entropy(hidden @ weight.T, target, label_smoothing=0.1)
    torch.testing.assert_close(smooth, right)
    assert abs(smooth - plain) > 1e-3


@ENTROPY
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_pytorch_91383_an_ignored_target_is_no_index(backend, reduction):
    inputs = Inputs()
    hidden, weight = inputs.normal(5, 8).requires_grad_(), inputs.normal(7, 8).requires_grad_()
    class_weight, target = inputs.uniform(7), inputs.integers(0, 7, 5)
    target[2] = -100
    options = {"label_smoothing": 0.2, "reduction": reduction}
    loss = run_on(backend, fastattn.linear_cross_entropy, hidden, weight, target,
                  class_weight=class_weight, **options)  # fmt: skip
    right = F.cross_entropy(hidden @ weight.T, target, class_weight, **options)
    torch.testing.assert_close(loss, right)
    found, expected = (torch.autograd.grad(x.sum(), (hidden, weight)) for x in (loss, right))
    torch.testing.assert_close(found, expected)
    assert not found[0][2].any()
