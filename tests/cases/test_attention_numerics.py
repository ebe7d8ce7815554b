"""Attention numerics that users reported wrong elsewhere, right here on every backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.testing import Inputs, backends, check, peers
from tests.harness import cast, offsets, run_on
from tests.ops.attention_cases import compare

BACKENDS = pytest.mark.parametrize("backend", backends("attention"))
attention = fastattn.scaled_dot_product_attention


@BACKENDS
def test_pytorch_103963_rows_that_see_nothing(backend):
    inputs = Inputs()
    query, key, value = (inputs.normal(1, 1, 8, 8) for _ in range(3))
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    mask[..., :4, :4] = True
    out, grads = compare(backend, query, key, value, mask)
    assert not out[..., 4:, :].any() and not grads[0][..., 4:, :].any()
    assert all(g.isfinite().all() for g in grads if g is not None)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_xformers_722_a_bias_that_starts_with_a_tile_of_minus_infinity(backend, dtype):
    inputs = Inputs()
    query, key, value = (inputs.normal(1, 2, n, 32, dtype=dtype) for n in (9, 128, 128))
    bias = inputs.normal(1, 2, 9, 128, dtype=dtype)
    bias[..., :64] = -torch.inf
    out, _ = compare(backend, query, key, value, bias)
    exact, *_ = peers.attention(
        *cast((query, key[:, :, 64:], value[:, :, 64:], bias[..., 64:]), torch.float64)
    )
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4 * torch.finfo(dtype).eps)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_flash_attention_334_one_query_one_key(backend, dtype):
    query, key, value = (
        (Inputs(i).normal(1, 1, 1, 16) * 3).to(dtype).requires_grad_() for i in range(3)
    )
    grad = Inputs(3).normal(1, 1, 1, 16, dtype=dtype)
    out = run_on(backend, attention, query, key, value)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    torch.testing.assert_close((out, grads[2]), (value, grad), rtol=1e-6, atol=0)
    # dP - delta cancels; what is left is the rounding of two float32 sums
    size = (grad.abs() * value.abs()).sum().item() * 9 / 4
    for got in grads[:2]:
        assert got.abs().max() <= 16 * torch.finfo(torch.float32).eps * size


@pytest.mark.parametrize("backend", backends("varlen_attention"))
def test_flash_attention_443_packed_queries_longer_than_their_one_key(backend):
    inputs = Inputs()
    lengths = (76, 34, 146)
    query = inputs.normal(sum(lengths), 2, 32).requires_grad_()
    key, value = (inputs.normal(3, 2, 32).requires_grad_() for _ in range(2))
    ends = offsets(lengths), offsets((1, 1, 1))
    out = run_on(backend, fastattn.varlen_attention, query, key, value, *ends, is_causal=True)
    last = torch.tensor(lengths).cumsum(0) - 1
    right = torch.zeros_like(out).index_copy(0, last, value)
    assert torch.equal(out, right)
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(g.isfinite().all() for g in grads)
    torch.testing.assert_close(grads[2], torch.ones_like(value))


@BACKENDS
@pytest.mark.parametrize("lengths", [(113, 203), (65, 127), (1, 129)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_flash_attention_1947_lengths_off_the_tile_with_large_scores(backend, lengths, dtype):
    q_len, kv_len = lengths
    inputs = Inputs()
    query = (inputs.normal(1, 2, q_len, 64) * 20).to(dtype)
    key = (inputs.normal(1, 2, kv_len, 64) * 20 - 10).to(dtype)  # all real scores below a pad's 0
    compare(backend, query.abs(), -key.abs(), inputs.normal(1, 2, kv_len, 64, dtype=dtype))


@BACKENDS
def test_pytorch_125674_all_inputs_1000(backend):
    x = torch.full((1, 16, 50, 64), 1000.0)
    out, grads = compare(backend, x, x, x)
    assert torch.allclose(out, x) and all(g.isfinite().all() for g in grads[:3])
    reason_free = run_on("reference", attention, x, x, x, return_weights=True)
    torch.testing.assert_close(reason_free.weights, torch.full((1, 16, 50, 50), 1 / 50))


@BACKENDS
def test_flashinfer_4452_more_queries_than_keys_bottom_right(backend):
    inputs = Inputs()
    query, key, value = (inputs.normal(1, 1, n, 8) for n in (5, 2, 2))
    options = {"is_causal": True, "causal_alignment": "bottom_right"}
    out, lse, _ = run_on(backend, attention, query, key, value, return_lse=True, **options)
    assert not out[:, :, :3].any() and (lse[..., :3] == -torch.inf).all()
    assert lse[..., 3:].isfinite().all()
    torch.testing.assert_close(out[:, :, 3], value[:, :, 0])


@BACKENDS
def test_xformers_0_0_23_lse_of_four_query_heads_on_one_key_head(backend):
    inputs = Inputs()
    tensors = (
        inputs.normal(2, 4, 65, 32),
        inputs.normal(2, 1, 65, 32),
        inputs.normal(2, 1, 65, 32),
    )

    def ours(*tensors: Tensor) -> tuple:
        return run_on(backend, attention, *tensors, enable_gqa=True, return_lse=True)[:2]

    def plain(*tensors: Tensor) -> tuple:
        return peers.attention(*tensors)[:2]

    grads = (inputs.normal(2, 4, 65, 32), inputs.normal(2, 4, 65))
    got = peers.gradients(ours, tensors, grads)
    exact = peers.gradients(plain, cast(tensors, torch.float64), cast(grads, torch.float64))
    peer = peers.gradients(plain, tensors, grads)
    names = ("output", "lse", "dq", "dk", "dv")
    for name, *found in zip(names, *((*x[0], *x[1]) for x in (got, exact, peer)), strict=True):
        check(name, *found)


@BACKENDS
def test_pytorch_191937_keys_and_values_expanded_over_heads(backend):
    inputs = Inputs()
    query = inputs.normal(2, 4, 7, 16, dtype=torch.bfloat16)
    key, value = (inputs.normal(2, 1, 33, 16, dtype=torch.bfloat16) for _ in range(2))
    mask = inputs.bools(2, 4, 7, 33)
    key, value = key.expand(2, 4, 33, 16), value.expand(2, 4, 33, 16)
    assert key.stride(1) == 0
    expanded = compare(backend, query, key, value, mask)
    whole = compare(backend, query, key.contiguous(), value.contiguous(), mask)
    assert torch.equal(expanded[0], whole[0])
    assert all(map(torch.equal, expanded[1][:3], whole[1][:3]))


@BACKENDS
@pytest.mark.parametrize("length", [128, 1024, 8192])
def test_llama_cpp_25593_half_precision_loses_no_more_than_float32_sums(backend, length):
    inputs = Inputs()
    query = inputs.normal(1, 1, 32, 64, dtype=torch.float16)
    key, value = (inputs.normal(1, 1, length, 64, dtype=torch.float16) for _ in range(2))
    out = run_on(backend, attention, query, key, value)
    exact, *_ = peers.attention(*cast((query, key, value), torch.float64))
    rounded_once = peers.attention(*cast((query, key, value), torch.float32))[0].half()
    errors = [(x.double() - exact).abs().max().item() for x in (out, rounded_once)]
    assert errors[0] <= 2 * errors[1]


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flash_attention_359_the_backward_50_times(backend, dtype):
    inputs = Inputs()
    tensors = [inputs.normal(2, 3, 70, 16, dtype=dtype).requires_grad_() for _ in range(3)]
    out = run_on(backend, attention, *tensors, is_causal=True)
    grad = inputs.normal(2, 3, 70, 16, dtype=dtype)
    first, *others = (torch.autograd.grad(out, tensors, grad, retain_graph=True) for _ in range(50))
    assert all(map(torch.equal, first, again) for again in others)
    assert all(torch.equal(a, b) for again in others for a, b in zip(first, again, strict=True))
