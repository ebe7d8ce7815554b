"""Sizes that broke launches and offsets elsewhere: many, none, and far apart."""

from __future__ import annotations

import pytest
import torch

import fastattn
from fastattn.testing import Inputs, backends, peers
from tests.harness import cast, offsets, run_on

BACKENDS = pytest.mark.parametrize("backend", backends("attention"))
VARLEN = pytest.mark.parametrize("backend", backends("varlen_attention"))
attention = fastattn.scaled_dot_product_attention


@pytest.mark.parametrize("backend", [b for b in backends("attention") if b != "emulator"])
@pytest.mark.parametrize("shape", [(65536, 1, 4, 16), (1, 65536, 4, 16)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_pytorch_142228_xformers_845_65536_batches_or_heads(backend, shape, is_causal):
    inputs = Inputs()
    tensors = [inputs.normal(*shape).requires_grad_() for _ in range(3)]
    out = run_on(backend, attention, *tensors, is_causal=is_causal)
    right = peers.attention(*tensors, is_causal=is_causal)[0]
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
    grad = inputs.normal(*shape)
    found, expected = (torch.autograd.grad(x, tensors, grad) for x in (out, right))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_pytorch_162588_more_than_2_to_the_32_scores_under_a_broadcast_mask():
    """On the backend that never holds them all; its last rows are what is looked at."""
    inputs, length = Inputs(), 66000
    query, key, value = (inputs.normal(1, 1, length, 8) for _ in range(3))
    mask = torch.zeros(1, 1, 1, length, dtype=torch.bool)
    mask[..., -70:] = True
    assert length * length > 2**32
    out = run_on("cpu", attention, query, key, value, mask)
    exact = peers.attention(*cast((query, key[:, :, -70:], value[:, :, -70:]), torch.float64))[0]
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


@BACKENDS
@pytest.mark.parametrize(
    ("query", "key"),
    [((0, 0, 2, 0), (0, 0, 2, 0)), ((2, 3, 4, 8), (2, 3, 0, 8)), ((2, 3, 0, 8), (2, 3, 5, 8)),
     ((0, 3, 4, 8), (0, 3, 5, 8)), ((2, 0, 4, 8), (2, 0, 5, 8))],
    ids=str,
)  # fmt: skip
def test_pytorch_174939_nothing_to_attend(backend, query, key):
    tensors = [torch.zeros(s, requires_grad=True) for s in (query, key, key)]
    out = run_on(backend, attention, *tensors, is_causal=True)
    assert out.shape == query and not out.any()
    grads = torch.autograd.grad(out.sum(), tensors)
    assert [g.shape for g in grads] == [t.shape for t in tensors]
    assert not any(g.any() for g in grads)


@VARLEN
@pytest.mark.parametrize(
    ("q_lens", "k_lens"), [((0, 1, 0, 1), (0, 1, 0, 1)), ((1, 1, 2, 0), (0, 1, 0, 1)), ((0,), (0,))]
)
def test_flash_attention_1537_packed_sequences_of_length_zero(backend, q_lens, k_lens):
    inputs = Inputs()
    query = inputs.normal(sum(q_lens), 2, 8).requires_grad_()
    key, value = (inputs.normal(sum(k_lens), 2, 8).requires_grad_() for _ in range(2))
    ends = offsets(q_lens), offsets(k_lens)
    out = run_on(backend, fastattn.varlen_attention, query, key, value, *ends)
    right = peers.varlen_attention(query, key, value, *ends)[0]
    torch.testing.assert_close(out, right)
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert [g.shape for g in grads] == [query.shape, key.shape, value.shape]
    assert all(g.isfinite().all() for g in grads)


def far_apart(rows: int, columns: int) -> torch.Tensor:
    """Rows that lie 2^31 elements apart, in memory that is asked for but hardly touched."""
    holder = torch.empty((rows - 1) * 2**31 + columns, dtype=torch.bfloat16)
    view = holder.as_strided((rows, columns), (2**31, 1))
    return view.copy_(Inputs().normal(rows, columns))


@pytest.mark.slow
@pytest.mark.parametrize("op", ["attention", "add_layer_norm", "softmax", "dropout"])
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_offsets_beyond_2_to_the_31(op, backend):
    if backend not in backends(op):
        pytest.skip(f"{op} has no backend {backend!r}")
    rng = torch.tensor([1, 2])
    function = {
        "attention": lambda x: attention(*[x[None, None]] * 3),
        "add_layer_norm": fastattn.add_layer_norm,
        "softmax": fastattn.softmax,
        "dropout": lambda x: fastattn.dropout(x, 0.5, rng_state=rng),
    }[op]
    x = far_apart(2, 64)
    assert torch.equal(run_on(backend, function, x), run_on(backend, function, x.contiguous()))
