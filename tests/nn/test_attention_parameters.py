"""Parameters of MultiHeadAttention: torch's names, order and first values; those of extras."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle

import pytest
import torch
from torch import nn

import fastattn
from fastattn.testing import Inputs

WIDTHS = [(None, None), (5, None), (None, 7), (5, 7)]
CONSTRUCTORS = list(itertools.product(WIDTHS, (True, False), (False, True), (False, True)))


def arguments(case):
    (kdim, vdim), bias, add_bias_kv, add_zero_attn = case
    return dict(
        bias=bias, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, kdim=kdim, vdim=vdim
    )


def both(case, **extra):
    modules = []
    for kind in (nn.MultiheadAttention, fastattn.MultiHeadAttention):
        torch.manual_seed(7)
        modules.append(kind(12, 3, **arguments(case), **extra))
        modules.append(torch.rand(()))
    return modules


def test_is_torchs_module():
    assert isinstance(fastattn.MultiHeadAttention(8, 2), nn.MultiheadAttention)


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_arguments_are_torchs_in_order_and_the_rest_keyword_only(method):
    ours = inspect.signature(getattr(fastattn.MultiHeadAttention, method)).parameters
    theirs = inspect.signature(getattr(nn.MultiheadAttention, method)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)
    rest = list(ours.values())[len(theirs) :]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in rest)


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_initial_values_and_random_numbers_drawn(case):
    theirs, their_next, ours, our_next = both(case)
    assert our_next == their_next
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, x in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], x), name
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_attributes(case):
    theirs, _, ours, _ = both(case, dropout=0.2, batch_first=True)
    names = "embed_dim kdim vdim num_heads head_dim dropout batch_first add_zero_attn".split()
    names += ["_qkv_same_embed_dim", "training"]
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name), name
    parameters = "in_proj_weight in_proj_bias q_proj_weight k_proj_weight v_proj_weight".split()
    for name in (*parameters, "bias_k", "bias_v"):
        assert (getattr(ours, name) is None) == (getattr(theirs, name) is None), name


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_state_dict_goes_both_ways(case):
    theirs, _, ours, _ = both(case, dtype=torch.float64)
    inputs = Inputs()
    other = {n: inputs.normal(*x.shape, dtype=x.dtype) for n, x in ours.state_dict().items()}
    ours.load_state_dict(other)
    theirs.load_state_dict(ours.state_dict())
    again = copy.deepcopy(ours)
    again.load_state_dict(theirs.state_dict())
    for name, x in other.items():
        assert torch.equal(theirs.state_dict()[name], x), name
        assert torch.equal(again.state_dict()[name], x), name


def test_optimizer_state_of_torchs_module_fits():
    case = CONSTRUCTORS[-1]
    theirs, _, ours, _ = both(case)
    optimizer = torch.optim.Adam(theirs.parameters())
    sum(p.sum() for p in theirs.parameters()).backward()
    optimizer.step()
    resumed = torch.optim.Adam(ours.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    for p in ours.parameters():
        assert resumed.state[p]["exp_avg"].shape == p.shape


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_compute_the_same(how, tmp_path):
    module = fastattn.MultiHeadAttention(
        12, 4, dropout=0.1, add_bias_kv=True, num_kv_heads=2, window=(2, 1), v_head_dim=5
    ).eval()
    if how == "deepcopy":
        other = copy.deepcopy(module)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(module))
    else:
        torch.save(module, tmp_path / "module.pt")
        other = torch.load(tmp_path / "module.pt", weights_only=False)
    x = Inputs().normal(5, 2, 12)
    for a, b in zip(module(x, x, x), other(x, x, x), strict=True):
        assert torch.equal(a, b)
    assert all(a is not b for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_shapes_with_extras():
    module = fastattn.MultiHeadAttention(
        10, 6, add_bias_kv=True, num_kv_heads=2, head_dim=3, v_head_dim=5
    )
    shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    assert shapes == {
        "in_proj_weight": (6 * 3 + 2 * 3 + 2 * 5, 10),
        "in_proj_bias": (6 * 3 + 2 * 3 + 2 * 5,),
        "bias_k": (1, 1, 2 * 3),
        "bias_v": (1, 1, 2 * 5),
        "out_proj.weight": (10, 6 * 5),
        "out_proj.bias": (10,),
    }


def test_shapes_with_extras_and_kdim():
    module = fastattn.MultiHeadAttention(
        10, 6, bias=False, kdim=7, vdim=8, num_kv_heads=2, head_dim=3, v_head_dim=5
    )
    assert {name: tuple(x.shape) for name, x in module.state_dict().items()} == {
        "q_proj_weight": (6 * 3, 10),
        "k_proj_weight": (2 * 3, 7),
        "v_proj_weight": (2 * 5, 8),
        "out_proj.weight": (10, 6 * 5),
    }


def test_v_head_dim_follows_head_dim():
    assert fastattn.MultiHeadAttention(12, 4, head_dim=5).v_head_dim == 5
    assert fastattn.MultiHeadAttention(12, 4, v_head_dim=5).head_dim == 3


@pytest.mark.parametrize(
    "extras", [{"window": 2}, {"causal_alignment": "bottom_right"}, {"num_kv_heads": 1}]
)
def test_extras_keep_torchs_encoder_layer_off_its_own_kernel(extras):
    """Its kernel for eval would compute without them: the layer must call the module."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layer.self_attn = fastattn.MultiHeadAttention(8, 2, batch_first=True, **extras)
    x = Inputs().normal(2, 6, 8)
    with torch.no_grad():
        trained, evaluated = layer.train()(x), layer.eval()(x)
    torch.testing.assert_close(evaluated, trained)


def test_dtype_and_device():
    module = fastattn.MultiHeadAttention(8, 2, add_bias_kv=True, device="meta", dtype=torch.float16)
    assert all(p.is_meta and p.dtype == torch.float16 for p in module.parameters())
    x = torch.empty(3, 2, 8, device="meta", dtype=torch.float16)
    output, weights = module(x, x, x)
    assert output.is_meta and output.shape == x.shape and weights.shape == (2, 3, 4)


@pytest.mark.parametrize("kdim", [None, 5])
def test_a_bias_of_another_dtype_is_cast(kdim):
    """As in torch's own test of a query and a bias whose dtypes differ."""
    module = fastattn.MultiHeadAttention(8, 2, kdim=kdim, batch_first=True, dtype=torch.float64)
    key = torch.ones(2, 3, kdim or 8, dtype=torch.float64)
    value = query = torch.ones(2, 3, 8, dtype=torch.float64)
    expected = module(query, key, value)
    module.in_proj_bias = nn.Parameter(module.in_proj_bias.half())
    output, weights = module(query, key, value)
    torch.testing.assert_close((output, weights), expected)
    output.sum().backward()
    assert module.in_proj_bias.grad.dtype == torch.float16
