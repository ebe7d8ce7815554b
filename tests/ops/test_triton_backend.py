"""What the triton backend promises, and what only it has: splits, declined calls, compiled code."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

import fastattn
from fastattn import use_backend
from fastattn._triton import configs
from fastattn.testing import Inputs, why_not
from tests.ops.attention_cases import compare
from tests.ops.calls import CALLS, forward_and_backward, make_calls
from tests.ops.test_coverage import DTYPES, NAMED, PROMISES

interpreted = pytest.mark.triton


@interpreted
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
    function, args, keywords = NAMED[name](dtype, **options)
    with use_backend("triton"):
        assert fastattn.explain(function, *args, **keywords).chosen == "triton"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="CPU tensors are taken here")
@pytest.mark.parametrize("name", NAMED)
def test_cpu_tensors_are_declined_outside_the_interpreter(name):
    function, args, keywords = NAMED[name](torch.float32)
    assert "the triton backend needs it on a GPU" in why_not("triton", function, *args, **keywords)


@interpreted
@pytest.mark.parametrize("name", NAMED)
def test_double_precision_is_declined(name):
    function, args, keywords = NAMED[name](torch.double)
    assert "float64: the triton backend takes" in why_not("triton", function, *args, **keywords)


@interpreted
def test_a_wide_head_is_declined():
    x = torch.zeros(1, 1, 2, 257)
    reason = why_not("triton", fastattn.scaled_dot_product_attention, x, x, x)
    assert reason == "head dimension 257, the triton backend takes up to 256"


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (40, 3)}], ids=str)
def test_few_queries_share_their_keys_among_blocks(dtype, options):
    """With one query, causal leaves one part all keys and the others none."""
    inputs = Inputs()
    assert configs.attention_splits(2, 3, 161, 32, configs.INTERPRETER) > 1
    query, key, value = (inputs.normal(1, 2, n, 16, dtype=dtype) for n in (3, 161, 161))
    padding = torch.zeros(1, 161, dtype=torch.bool)
    padding[:, 100:] = True
    options = {"causal_alignment": "bottom_right", **options}
    compare("triton", query, key, value, key_padding_mask=padding, **options)
    compare("triton", query, key, value, **options)


@interpreted
@pytest.mark.parametrize("name", CALLS)
def test_compiled_whole_with_dynamic_sizes(name):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(*tensors):
        return CALLS[name].function(*tensors)

    with use_backend("triton"), torch._dynamo.config.patch(error_on_recompile=True):
        for batch, length in ((3, 5), (4, 9)):
            call = make_calls(batch, length)[name]
            right = forward_and_backward(call, *call.tensors)
            found = forward_and_backward(call._replace(function=compiled), *call.tensors)
            for one, other in zip((*found[0], *found[1]), (*right[0], *right[1]), strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_configurations_are_powers_of_two_that_a_product_takes(arch, itemsize):
    for kernel, (dim, value_dim) in itertools.product(
        ("forward", "dq", "dkdv"), ((1, 1), (33, 64), (64, 64), (128, 80), (256, 256))
    ):
        for is_heavy, q_len in itertools.product((False, True), (1, 1000)):
            block_dk, block_dv, config = configs.attention(
                kernel, dim, value_dim, itemsize, arch, is_heavy=is_heavy, q_len=q_len
            )
            assert block_dk >= dim and block_dv >= value_dim
            for size in (block_dk, block_dv, config.block_m, config.block_n):
                assert size >= 16 and size & (size - 1) == 0
            assert config.num_warps in (1, 2, 4, 8)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_splits_fill_the_processors_and_no_more(arch):
    assert configs.attention_splits(4096, 2048, 2048, 128, arch) == 1
    assert configs.attention_splits(1, 1, 128, 128, arch) == 1
    assert configs.attention_splits(8, 1, 2**16, 128, arch) > 4
    assert configs.attention_splits(0, 0, 0, 128, arch) == 1
