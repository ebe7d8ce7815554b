"""Where dropout's masks come from: torch's generator, drawn outside the ops, once per call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn.testing import Inputs

ENDS = torch.tensor([0, 4, 9], dtype=torch.int32)


def attention(x: Tensor) -> Tensor:
    return fastattn.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True)


def varlen_attention(x: Tensor) -> Tensor:
    packed = x.flatten(0, 1).transpose(0, 1)
    return fastattn.varlen_attention(packed, packed, packed, ENDS, ENDS, dropout_p=0.5)


def add_layer_norm(x: Tensor) -> Tensor:
    return fastattn.add_layer_norm(x, torch.ones_like(x), dropout_p=0.5)


def dropout(x: Tensor) -> Tensor:
    return fastattn.dropout(x, 0.5)


FUNCTIONS = pytest.mark.parametrize(
    "function", [attention, varlen_attention, add_layer_norm, dropout], ids=lambda f: f.__name__
)


def make_x() -> Tensor:
    return Inputs().normal(1, 2, 9, 8)


@FUNCTIONS
def test_manual_seed_repeats_a_call_and_the_next_call_differs(function):
    x = make_x()
    torch.manual_seed(7)
    first, second = function(x), function(x)
    torch.manual_seed(7)
    assert torch.equal(function(x), first) and torch.equal(function(x), second)
    assert not torch.equal(first, second)


@FUNCTIONS
def test_torchs_generator_moves_only_for_a_mask(function):
    """Not where rng_state is given, nor without dropout."""
    before = torch.get_rng_state()
    x, rng = make_x(), torch.tensor([1, 2])
    fastattn.scaled_dot_product_attention(x, x, x, dropout_p=0.5, rng_state=rng)
    fastattn.add_layer_norm(x, x, dropout_p=0.5, rng_state=rng)
    fastattn.dropout(x, 0.5, rng_state=rng)
    fastattn.scaled_dot_product_attention(x, x, x)
    fastattn.add_layer_norm(x, x)
    fastattn.dropout(x, 0.0)
    assert torch.equal(torch.get_rng_state(), before)
    function(x)
    assert not torch.equal(torch.get_rng_state(), before)


@FUNCTIONS
def test_the_backward_remembers_its_mask(function):
    """Another draw between forward and backward changes nothing."""
    x = make_x().requires_grad_()
    torch.manual_seed(7)
    (right,) = torch.autograd.grad(function(x).sum(), x)
    torch.manual_seed(7)
    out = function(x)
    function(x), torch.rand(3)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, right)


@FUNCTIONS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_draws_the_same_again(function, use_reentrant):
    x = make_x().requires_grad_()
    torch.manual_seed(7)
    right = function(x)
    (right_grad,) = torch.autograd.grad(right.square().sum(), x)
    torch.manual_seed(7)
    found = checkpoint(function, x, use_reentrant=use_reentrant)
    torch.rand(3)
    found.square().sum().backward()
    assert torch.equal(found, right) and torch.equal(x.grad, right_grad)


@FUNCTIONS
def test_compiled_code_draws_anew_at_every_call(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = make_x()
    torch.manual_seed(7)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(7)
    assert torch.equal(compiled(x), first) and not torch.equal(first, second)


@FUNCTIONS
def test_a_forked_generator_is_respected(function):
    x = make_x()
    torch.manual_seed(7)
    with torch.random.fork_rng():
        function(x)
    first = function(x)
    torch.manual_seed(7)
    assert torch.equal(function(x), first)
