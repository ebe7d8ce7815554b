from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

import fastattn
from fastattn.testing import Inputs, check_all, peers

SETTINGS = list(
    itertools.product(("mean", "sum", "none"), (0.0, 0.1), ("uniform", "exclusive"), (False, True))
)


def data(dtype=torch.float32, features=6, classes=11, tokens=(3, 4)):
    inputs = Inputs()
    target = inputs.integers(0, classes, *tokens)
    target[0, 1] = -100
    return inputs.normal(*tokens, features, dtype=dtype), target, inputs


@pytest.mark.parametrize("bias", [False, True])
def test_parameters_are_linears(bias):
    torch.manual_seed(1)
    theirs = nn.Linear(6, 11, bias=bias)
    torch.manual_seed(1)
    ours = fastattn.LinearCrossEntropy(6, 11, bias=bias)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, x in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], x)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction, label_smoothing, smoothing, bias", SETTINGS)
def test_against_cross_entropy(
    backend, reduction, label_smoothing, smoothing, bias, weighted, dtype
):
    hidden, target, inputs = data(dtype)
    class_weight = inputs.uniform(11, dtype=dtype) + 0.5 if weighted else None
    settings = dict(label_smoothing=label_smoothing, smoothing=smoothing, reduction=reduction)
    module = fastattn.LinearCrossEntropy(
        6, 11, bias=bias, class_weight=class_weight, return_nll=True, dtype=dtype, **settings
    )
    given = (hidden, *(p.detach() for p in module.parameters()))
    grad = inputs.normal(3, 4, dtype=dtype) if reduction == "none" else torch.ones((), dtype=dtype)

    def ours(hidden, *parameters):
        state = dict(zip(dict(module.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(module, state, (hidden, target))

    def plain(hidden, weight, bias=None):
        weights = None if class_weight is None else class_weight.to(hidden.dtype)
        loss, nll = peers.linear_cross_entropy(
            hidden, weight, target, bias, weights, ignore_index=-100, **settings
        )
        return loss.view_as(grad), nll.detach().view_as(grad)

    found, right, peer = (
        sum(peers.gradients(f, x, (g, None)), ())
        for f, x, g in (
            (ours, given, grad),
            (plain, tuple(x.double() for x in given), grad.double()),
            (plain, given, grad),
        )
    )
    names = tuple(f"{i}" for i in range(len(found)))
    check_all(names, found, right, peer)


def test_tied_weight_is_the_same_parameter(backend):
    embedding = nn.Embedding(11, 6)
    module = fastattn.LinearCrossEntropy(6, 11, weight=embedding.weight)
    assert module.weight is embedding.weight
    hidden, target, _ = data()
    module(hidden, target).backward()
    tied = embedding.weight.grad.clone()
    embedding.weight.grad = None
    logits = hidden @ embedding.weight.T
    nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    torch.testing.assert_close(tied, embedding.weight.grad)


def test_a_tied_weight_and_its_initial_value_are_left_alone():
    embedding = nn.Embedding(11, 6)
    before = embedding.weight.detach().clone()
    state = torch.get_rng_state()
    fastattn.LinearCrossEntropy(6, 11, weight=embedding.weight)
    assert torch.equal(embedding.weight, before) and torch.equal(torch.get_rng_state(), state)


def test_own_ignore_index_and_one_loss(backend):
    module = fastattn.LinearCrossEntropy(6, 11, ignore_index=3)
    hidden, target, _ = data()
    target[0, 1] = 3
    logits = module.logits(hidden)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=3)
    torch.testing.assert_close(module(hidden, target), expected)


def test_class_weight_is_a_buffer():
    module = fastattn.LinearCrossEntropy(6, 3, class_weight=torch.tensor([1.0, 2.0, 3.0]))
    assert "class_weight" in module.state_dict()
    assert module.double().class_weight.dtype == torch.float64


def test_compiles_whole():
    module = fastattn.LinearCrossEntropy(6, 11, bias=True, label_smoothing=0.1, return_nll=True)
    hidden, target, _ = data()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, target), module(hidden, target))


def test_copies_and_words():
    module = fastattn.LinearCrossEntropy(6, 11, bias=True, label_smoothing=0.1)
    hidden, target, _ = data()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(hidden, target), module(hidden, target))
    assert "in_features=6, num_classes=11, bias=True, label_smoothing=0.1" in repr(module)
