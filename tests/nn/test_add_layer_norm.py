from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fastattn
from fastattn.testing import Inputs, check_all, peers, philox

AFFINE = [(True, True), (True, False), (False, True)]


def make(width=12, **arguments):
    module = fastattn.AddLayerNorm(width, **arguments)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("elementwise_affine, bias", AFFINE)
def test_parameters_are_layer_norms(elementwise_affine, bias):
    arguments = dict(elementwise_affine=elementwise_affine, bias=bias, dtype=torch.float64)
    theirs, ours = nn.LayerNorm(12, **arguments), fastattn.AddLayerNorm(12, **arguments)
    assert isinstance(ours, nn.LayerNorm)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, x in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], x)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("return_sum", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("elementwise_affine, bias", AFFINE)
def test_against_layer_norm(backend, elementwise_affine, bias, with_residual, return_sum, dtype):
    module = make(elementwise_affine=elementwise_affine, bias=bias, return_sum=return_sum, eps=1e-3)
    module = module.to(dtype)
    inputs = Inputs()
    tensors = [inputs.normal(2, 5, 12, dtype=dtype) for _ in range(1 + with_residual)]
    grads = tuple(inputs.normal(2, 5, 12, dtype=dtype) for _ in range(1 + return_sum))
    given = (*tensors, *(p.detach() for p in module.parameters()))

    def ours(*leaves):
        parameters = dict(zip(module.state_dict(), leaves[len(tensors) :], strict=True))
        found = torch.func.functional_call(module, parameters, leaves[: len(tensors)])
        return found if return_sum else (found,)

    def plain(*leaves):
        total = sum(leaves[: len(tensors)])
        parameters = dict(zip(module.state_dict(), leaves[len(tensors) :], strict=True))
        weight, shift = parameters.get("weight"), parameters.get("bias")
        out = nn.functional.layer_norm(total, (12,), weight, shift, eps=1e-3)
        return (out, total) if return_sum else (out,)

    found, right, peer = (
        sum(peers.gradients(f, x, g), ())
        for f, x, g in (
            (ours, given, grads),
            (plain, tuple(x.double() for x in given), tuple(g.double() for g in grads)),
            (plain, given, grads),
        )
    )
    names = tuple(f"{i}" for i in range(len(found)))
    check_all(names, found, right, peer)


@pytest.mark.parametrize("with_residual", [False, True])
def test_dropout_is_the_documented_philox_and_in_training_only(backend, with_residual):
    module = make(dropout=0.3, return_sum=True, dtype=torch.float64)
    inputs = Inputs()
    x, residual = (inputs.normal(2, 5, 12, dtype=torch.float64) for _ in range(2))
    given = (x, residual) if with_residual else (x,)
    torch.manual_seed(5)
    rng_state = torch.randint(2**63 - 1, (2,))
    keep = philox.rowwise_keep(rng_state, 0.3, x.shape)
    torch.manual_seed(5)
    found = module(*given)
    affine = (module.weight, module.bias)
    right = peers.add_layer_norm(x, *given[1:] or (None,), *affine, keep=keep, dropout_p=0.3)
    torch.testing.assert_close(found, right)
    expected = peers.add_layer_norm(x, *given[1:] or (None,), *affine)
    torch.testing.assert_close(module.eval()(*given), expected)


@pytest.mark.parametrize("return_sum", [False, True])
def test_compiles_whole(return_sum):
    module = make(dropout=0.2, return_sum=return_sum)
    x, residual = Inputs().normal(2, 3, 5, 12).unbind(0)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    found = compiled(x, residual)
    torch.manual_seed(1)
    torch.testing.assert_close(found, module(x, residual))


def test_copies_and_words():
    module = make(dropout=0.2, return_sum=True).eval()
    x = Inputs().normal(3, 12)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x), module(x), rtol=0, atol=0)
    assert "dropout=0.2, return_sum=True" in repr(module)
