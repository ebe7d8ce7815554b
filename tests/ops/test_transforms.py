"""Every op under torch.func and batched gradients; forward mode is refused, never silently zero."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import fastattn
from fastattn.testing import Inputs
from tests.ops.calls import CALLS, RNG

NAMES = [name for name in CALLS if not name.startswith("varlen")]


@pytest.fixture(autouse=True)
def no_warnings():
    """torch's slow fallback for ops without a rule for vmap warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop")
        yield


def split(call):
    """The first tensor, and a scalar function of it."""
    first, *rest = call.tensors

    def loss(x):
        found = call.function(x, *rest)
        found = [found] if isinstance(found, Tensor) else found
        return sum(out.double().square().sum() for out in found if out is not None)

    return first, loss


@pytest.mark.parametrize("name", CALLS)
def test_grad_is_autograds(name):
    x, loss = split(CALLS[name])
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(grad(loss)(x), expected, rtol=0, atol=0)
    value, pull = vjp(loss, x)
    torch.testing.assert_close(pull(torch.ones_like(value))[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CALLS)
def test_vmap_is_a_loop(name):
    x, loss = split(CALLS[name])
    xs = torch.stack([x, x.flip(0), x * 0.5], 1)
    expected = torch.stack([loss(sample) for sample in xs.unbind(1)])
    torch.testing.assert_close(vmap(loss, in_dims=1)(xs), expected)


@pytest.mark.parametrize("name", CALLS)
def test_vmap_of_grad_and_grad_of_vmap(name):
    x, loss = split(CALLS[name])
    xs = torch.stack([x, x.flip(0)])
    expected = torch.stack([grad(loss)(sample) for sample in xs])
    torch.testing.assert_close(vmap(grad(loss))(xs), expected)
    torch.testing.assert_close(grad(lambda xs: vmap(loss)(xs).sum())(xs), expected)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("how", ["jvp", "make_dual"])
def test_forward_mode_is_refused(name, how):
    x, loss = split(CALLS[name])
    with pytest.raises(NotImplementedError, match="a tensor with a tangent .* reverse mode is"):
        if how == "jvp":
            jvp(loss, (x,), (torch.ones_like(x),))
        else:
            with forward_ad.dual_level():
                loss(forward_ad.make_dual(x, torch.ones_like(x)))


def test_a_tangent_elsewhere_is_no_obstacle():
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    expected = fastattn.scaled_dot_product_attention(q, k, v)

    def scaled(t):
        return t * fastattn.scaled_dot_product_attention(q, k, v)

    t = torch.ones(())
    torch.testing.assert_close(jvp(scaled, (t,), (t,)), (expected, expected))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_a_batch(name):
    """``is_grads_batched``, by which torch's gradcheck and vectorized jacobians call a backward."""
    call = CALLS[name]
    leaf = call.tensors[0].clone().requires_grad_()
    out = call.function(leaf, *call.tensors[1:])
    out = out if isinstance(out, Tensor) else out[0]
    grads = Inputs().normal(3, *out.shape).to(out.dtype)
    expected = [torch.autograd.grad(out, leaf, g, retain_graph=True)[0] for g in grads]
    (found,) = torch.autograd.grad(out, leaf, grads, is_grads_batched=True)
    torch.testing.assert_close(found, torch.stack(expected))


def test_second_derivatives():
    x = Inputs().normal(1, 1, 3, 2, dtype=torch.float64)

    def attend(x):
        return fastattn.scaled_dot_product_attention(x, x, x, is_causal=True)

    hessian = jacrev(jacrev(lambda x: attend(x).square().sum()))(x)
    expected = torch.autograd.functional.hessian(lambda x: attend(x).square().sum(), x)
    torch.testing.assert_close(hessian, expected)


def test_gradients_of_each_sample_of_a_module():
    """The use that torch.func is for: a model's gradients sample by sample."""
    module = fastattn.MultiHeadAttention(8, 2, batch_first=True)
    parameters = dict(module.named_parameters())
    xs = Inputs().normal(3, 4, 8)

    def loss(parameters, x):
        output, weights = functional_call(module, parameters, (x[None],) * 3)
        return output.square().sum() + weights.square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, xs)
    for i, x in enumerate(xs):
        one = grad(loss)(parameters, x)
        torch.testing.assert_close({n: g[i] for n, g in found.items()}, one)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_follows_the_randomness_asked_for(randomness):
    x = torch.ones(2, 64)
    rows = vmap(lambda x: fastattn.dropout(x, 0.5), randomness=randomness)(x)
    assert torch.equal(rows[0], rows[1]) == (randomness == "same")
    fixed = vmap(lambda x: fastattn.dropout(x, 0.5, rng_state=RNG))(x)
    assert torch.equal(fixed[0], fixed[1])
