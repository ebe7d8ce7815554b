"""What the cpu backend promises to run, for every op that it has a kernel for."""

from __future__ import annotations

import itertools

import pytest
import torch

import fastattn
from fastattn import _native
from fastattn.testing import why_not
from tests.ops import attention_cases

# What this version must have; any other is held to the same once it exists.
KERNELS = (
    "attention", "varlen_attention", "add_layer_norm", "softmax", "linear_cross_entropy", "dropout",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RNG = torch.tensor([1, 2])

native = pytest.mark.skipif(not _native.available(), reason=str(_native.why_not_available()))


def attention(dtype, head_dim=64, **options):
    x = torch.zeros(2, 4, 6, head_dim, dtype=dtype)
    return fastattn.scaled_dot_product_attention, (x, x, x), options


def varlen_attention(dtype, head_dim=64, **options):
    x, ends = torch.zeros(6, 4, head_dim, dtype=dtype), torch.tensor([0, 2, 6]).int()
    return fastattn.varlen_attention, (x, x, x, ends, ends), options


def add_layer_norm(dtype, residual=None, weight=None, **options):
    x = torch.zeros(3, 9, dtype=dtype)
    residual = None if residual is None else x.to(residual)
    weight = None if weight is None else torch.ones(9, dtype=weight)
    return fastattn.add_layer_norm, (x, residual, weight, weight), options


def softmax(dtype, **options):
    return fastattn.softmax, (torch.zeros(2, 5, 5, dtype=dtype),), options


def linear_cross_entropy(dtype, weighted=False, **options):
    hidden, weight = torch.zeros(4, 8, dtype=dtype), torch.zeros(11, 8, dtype=dtype)
    if weighted:
        options |= {"bias": weight[:, 0], "class_weight": torch.ones(11)}
    return fastattn.linear_cross_entropy, (hidden, weight, torch.zeros(4).long()), options


def dropout(dtype, **options):
    return fastattn.dropout, (torch.zeros(3, 5, dtype=dtype), 0.5), options


ATTENTION = [
    {}, *attention_cases.PATTERNS.values(), {"dropout_p": 0.1, "rng_state": RNG}, {"scale": 2.0},
    {"return_lse": True}, *({"head_dim": d} for d in (1, 8, 33, 64, 128, 256)),
]  # fmt: skip
PROMISES = {
    attention: [
        *ATTENTION,
        {"return_weights": True},
        {"attn_mask": torch.ones(6, 6).bool()},
        {"attn_mask": torch.ones(2, 4, 6, 6)},
        {"key_padding_mask": torch.zeros(2, 6).bool()},
    ],
    varlen_attention: ATTENTION,
    add_layer_norm: [
        {}, {"residual": torch.float32}, {"residual": torch.bfloat16}, {"weight": torch.float32},
        {"dropout_p": 0.1, "rng_state": RNG}, {"return_sum": True, "residual": torch.float32},
    ],
    softmax: [
        {}, {"is_causal": True}, {"scale": 0.5}, {"mask": torch.ones(5, 5).bool()},
        {"mask": torch.ones(2, 1, 5)},
    ],
    linear_cross_entropy: [
        {}, {"weighted": True}, {"label_smoothing": 0.1, "smoothing": "exclusive"},
        {"reduction": "none"}, {"return_nll": True},
    ],
    dropout: [{}],
}  # fmt: skip
NAMED = {make.__name__: make for make in PROMISES}


@native
@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        (name, dtype, options)
        for name, make in NAMED.items()
        for dtype, options in itertools.product(DTYPES, PROMISES[make])
    ],
    ids=str,
)
def test_the_kernel_runs(name, dtype, options):
    function, args, _ = NAMED[name](torch.float32)
    declined = why_not("cpu", function, *args)
    if declined is not None and name not in KERNELS:
        pytest.skip(declined)
    function, args, keywords = NAMED[name](dtype, **options)
    assert why_not("cpu", function, *args, **keywords) is None
    assert fastattn.explain(function, *args, **keywords).chosen == "cpu"


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_the_reference_runs_everything(name, dtype):
    for options in PROMISES[NAMED[name]]:
        function, args, keywords = NAMED[name](dtype, **options)
        assert why_not("reference", function, *args, **keywords) is None
