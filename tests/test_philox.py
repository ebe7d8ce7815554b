"""Dropout masks, bit for bit against a NumPy Philox4x32 that gives the published answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import _philox
from fastattn.testing import Inputs, backends, philox
from tests.harness import run_on

# From kat_vectors of Random123 (Salmon et al.): rounds, counter, key, answer.
KNOWN_ANSWERS = [
    (7, "00000000 00000000 00000000 00000000", "00000000 00000000",
     "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip

# Seeds and offsets with every bit of their words in play; the kernels see two's complement.
RNG_STATES = [
    (0, 0),
    (1, 2),
    (-1, -1),
    (2**63 - 1, 2**32),
    (-(2**63), 2**31),
    (2**32 - 1, 2**63 - 1),
]
PROBABILITIES = [1e-9, 0.1, 0.5, 0.9, 1 - 2**-33, 1.0]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("rounds", "counter", "key", "answer"), KNOWN_ANSWERS)
def test_numpy_gives_the_published_answers(rounds, counter, key, answer):
    found = philox.philox4x32(np.array(words(counter), np.uint32), tuple(words(key)), rounds)
    assert found.tolist() == words(answer)


@pytest.mark.parametrize(("rounds", "counter", "key", "answer"), KNOWN_ANSWERS[:3])
def test_torch_gives_the_published_answers(rounds, counter, key, answer):
    assert rounds == _philox.ROUNDS
    as_tensors = ([torch.tensor(w) for w in words(text)] for text in (counter, key))
    assert [int(word) for word in _philox.philox4x32(*as_tensors)] == words(answer)


def test_torch_equals_numpy_on_many_counters():
    generator = np.random.default_rng(0)
    counters = generator.integers(2**32, size=(4096, 4), dtype=np.uint64)
    key = (0xDEADBEEF, 0x0BADCAFE)
    expected = philox.philox4x32(counters.astype(np.uint32), key)
    columns = [torch.from_numpy(counters[:, i].astype(np.int64)) for i in range(4)]
    found = _philox.philox4x32(columns, [torch.tensor(word) for word in key])
    assert np.array_equal(torch.stack(found, -1).numpy(), expected.astype(np.int64))


@pytest.mark.parametrize("state", RNG_STATES)
@pytest.mark.parametrize("p", PROBABILITIES)
def test_keep_masks_of_the_specification(state, p):
    rng = torch.tensor(state)
    shape = torch.Size((2, 3, 5, 7))
    found = _philox.attention_keep_mask(rng, p, shape, first_head=11)
    assert torch.equal(found, philox.attention_keep(rng, p, shape, first_head=11))
    assert torch.equal(_philox.rowwise_keep_mask(rng, p, shape), philox.rowwise_keep(rng, p, shape))


def test_a_row_index_uses_two_words():
    rng = torch.tensor([5, 6])
    row = torch.arange(2**32 - 2, 2**32 + 2)
    found = _philox.keep_mask(rng, 0.5, 9, row & 0xFFFFFFFF, row >> 32)
    assert torch.equal(found, philox.rowwise_keep(rng, 0.5, (4, 9), first_row=2**32 - 2))


@pytest.mark.parametrize("backend", backends("attention"))
@pytest.mark.parametrize("state", RNG_STATES)
@pytest.mark.parametrize("p", PROBABILITIES)
def test_attention(backend, state, p):
    """With V the identity the output is the dropped weights: its zeros are the mask."""
    rng = torch.tensor(state)
    batch, heads, q_len, kv_len = shape = (2, 3, 9, 37)
    query, key = torch.zeros(batch, heads, q_len, 8), torch.zeros(batch, heads, kv_len, 8)
    value = torch.eye(kv_len).expand(batch, heads, kv_len, kv_len)
    out = run_on(backend, fastattn.scaled_dot_product_attention, query, key, value,
              dropout_p=p, rng_state=rng)  # fmt: skip
    assert_is_mask(out * kv_len, philox.attention_keep(rng, p, shape), p)


@pytest.mark.parametrize("backend", backends("attention"))
@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"window": (3, 2)}, {"enable_gqa": True}], ids=str
)
def test_attention_masks_do_not_move_the_dropout(backend, options):
    rng = torch.tensor([3, 4])
    kv_heads = 2 if "enable_gqa" in options else 4
    query, key = torch.zeros(2, 4, 21, 8), torch.zeros(2, kv_heads, 21, 8)
    value = torch.eye(21).expand(2, kv_heads, 21, 21)
    whole = run_on(backend, fastattn.scaled_dot_product_attention, query, key, value, **options)
    out = run_on(backend, fastattn.scaled_dot_product_attention, query, key, value,
              dropout_p=0.4, rng_state=rng, **options)  # fmt: skip
    kept = philox.attention_keep(rng, 0.4, (2, 4, 21, 21))
    torch.testing.assert_close(out, whole * kept / 0.6, rtol=1e-5, atol=1e-6)
    assert torch.equal(out != 0, kept & (whole != 0))


@pytest.mark.parametrize("backend", backends("attention"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_weights_and_gradients_use_the_same_mask(backend, dtype):
    rng = torch.tensor([-8, 77])
    shape = (2, 2, 19, 70)
    kept = philox.attention_keep(rng, 0.5, shape)
    query, key = (torch.zeros(2, 2, n, 16, dtype=dtype) for n in shape[2:])
    value = torch.eye(70, dtype=dtype).expand(2, 2, 70, 70).clone().requires_grad_()
    out = run_on(backend, fastattn.scaled_dot_product_attention, query, key, value, dropout_p=0.5,
              rng_state=rng, return_weights=True)  # fmt: skip
    assert torch.equal(out.weights != 0, kept)
    (grad_value,) = torch.autograd.grad(out.output.sum(), value)
    expected = (kept.sum(2) * 2 / 70).unsqueeze(-1).expand_as(grad_value)
    torch.testing.assert_close(grad_value.float(), expected, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("backend", backends("varlen_attention"))
@pytest.mark.parametrize("state", RNG_STATES)
def test_varlen_attention_counts_within_each_sequence(backend, state):
    rng, heads, q_lens, k_lens = torch.tensor(state), 3, (5, 0, 9, 2), (6, 4, 0, 11)
    ends_q, ends_k = (
        torch.tensor([0, *lens]).cumsum(0).to(torch.int32) for lens in (q_lens, k_lens)
    )
    query, key = torch.zeros(sum(q_lens), heads, 8), torch.zeros(sum(k_lens), heads, 8)
    value = torch.eye(sum(k_lens)).unsqueeze(1).expand(-1, heads, -1)
    out = run_on(backend, fastattn.varlen_attention, query, key, value, ends_q, ends_k,
              dropout_p=0.5, rng_state=rng)  # fmt: skip
    for b, (q_len, k_len) in enumerate(zip(q_lens, k_lens, strict=True)):
        rows = slice(int(ends_q[b]), int(ends_q[b + 1]))
        columns = slice(int(ends_k[b]), int(ends_k[b + 1]))
        kept = philox.attention_keep(rng, 0.5, (1, heads, q_len, k_len), first_head=b * heads)
        assert torch.equal(out[rows, :, columns].transpose(0, 1) != 0, kept[0])


@pytest.mark.parametrize("backend", backends("add_layer_norm"))
@pytest.mark.parametrize("state", RNG_STATES)
@pytest.mark.parametrize("shape", [(3, 5, 37), (1, 1), (6,), (0, 4), (300, 3)], ids=str)
def test_add_layer_norm(backend, state, shape):
    rng = torch.tensor(state)
    x = Inputs().normal(*shape).abs().add(1).requires_grad_()
    _, total = run_on(backend, fastattn.add_layer_norm, x, torch.zeros(shape), dropout_p=0.3,
                   rng_state=rng, return_sum=True)  # fmt: skip
    kept = philox.rowwise_keep(rng, 0.3, shape)
    assert_is_mask(total / x, kept, 0.3)
    (grad_x,) = torch.autograd.grad(total.sum(), x)
    assert_is_mask(grad_x, kept, 0.3)


@pytest.mark.parametrize("backend", backends("dropout"))
@pytest.mark.parametrize("state", RNG_STATES)
@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("shape", [(4, 3, 37), (6,), (1, 1), (3, 0), ()], ids=str)
def test_dropout(backend, state, p, shape):
    rng = torch.tensor(state)
    x = torch.ones(shape, requires_grad=True)
    out = run_on(backend, fastattn.dropout, x, p, rng_state=rng)
    kept = philox.rowwise_keep(rng, p, shape)
    assert_is_mask(out, kept, p)
    (grad_x,) = torch.autograd.grad(out.sum(), x)
    assert_is_mask(grad_x, kept, p)


def assert_is_mask(found: Tensor, kept: Tensor, p: float) -> None:
    """``found`` is 1 / (1 - p) where kept (within float32's rounding) and exactly 0 elsewhere."""
    assert torch.equal(found != 0, kept)
    if p < 1:
        expected = kept.to(torch.float64) / (1 - p)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
