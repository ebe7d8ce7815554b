"""patch_sdpa: calls of torch's scaled_dot_product_attention reach fastattn's."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fastattn
from fastattn.testing import Inputs

TORCHS = F.scaled_dot_product_attention


def qkv(q_len=3, kv_len=5):
    inputs = Inputs()
    return (
        inputs.normal(2, 2, q_len, 4),
        inputs.normal(2, 2, kv_len, 4),
        inputs.normal(2, 2, kv_len, 6),
    )


@pytest.fixture
def calls(monkeypatch):
    """Names of the backends that ran."""
    seen = []
    select = fastattn.ops.attention._op.select

    def recording(*args):
        seen.append(select(*args))
        return seen[-1]

    monkeypatch.setattr(fastattn.ops.attention._op, "select", recording)
    return seen


def test_only_within_the_block(calls):
    q, k, v = qkv()
    with fastattn.patch_sdpa():
        found = F.scaled_dot_product_attention(q, k, v, scale=0.3)
        assert len(calls) == 1
    assert F.scaled_dot_product_attention is TORCHS
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, scale=0.3))
    assert len(calls) == 1


def test_every_backend_of_ours_and_no_recursion(calls):
    q, k, v = qkv()
    for backend in ("torch", "reference", "auto"):
        with fastattn.patch_sdpa(), fastattn.use_backend(backend):
            found = F.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(found, TORCHS(q, k, v))
    assert len(calls) == 3


def test_modules_that_imported_the_name(monkeypatch, calls):
    before, during = ModuleType("imported_before"), ModuleType("imported_during")
    before.scaled_dot_product_attention = before.theirs = TORCHS
    monkeypatch.setitem(sys.modules, before.__name__, before)
    monkeypatch.setitem(sys.modules, during.__name__, during)
    with fastattn.patch_sdpa():
        during.scaled_dot_product_attention = F.scaled_dot_product_attention
        before.scaled_dot_product_attention(*qkv())
        during.scaled_dot_product_attention(*qkv())
        assert before.theirs is TORCHS
    assert len(calls) == 2
    for module in (before, during):
        assert module.scaled_dot_product_attention is TORCHS


def test_ends_with_an_exception_and_with_the_outermost_block():
    with pytest.raises(ZeroDivisionError), fastattn.patch_sdpa(), fastattn.patch_sdpa():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is TORCHS
    with fastattn.patch_sdpa():
        with fastattn.patch_sdpa():
            pass
        assert F.scaled_dot_product_attention is not TORCHS


def test_overlapping_threads():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with fastattn.patch_sdpa():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with fastattn.patch_sdpa():
        thread.start()
        inside.wait()
    try:
        assert F.scaled_dot_product_attention is not TORCHS
    finally:
        leave.set()
        thread.join()
    assert F.scaled_dot_product_attention is TORCHS


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_torchs_causal_biases(calls, make):
    q, k, v = qkv()
    expected = TORCHS(q, k, v, attn_mask=make(3, 5)._materialize())
    with fastattn.patch_sdpa():
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=make(3, 5))
    torch.testing.assert_close(found, expected)
    assert len(calls) == 1


def test_a_causal_bias_of_other_lengths_is_refused():
    q, k, v = qkv()
    with (
        fastattn.patch_sdpa(),
        pytest.raises(ValueError, match="attn_mask is a CausalBias of 4 x 5"),
    ):
        F.scaled_dot_product_attention(q, k, v, attn_mask=causal_upper_left(4, 5))


def test_nested_tensors_reach_torch(calls):
    x = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    expected = F.scaled_dot_product_attention(x, x, x)
    with fastattn.patch_sdpa():
        found = F.scaled_dot_product_attention(x, x, x)
    assert found.is_nested and not calls
    for got, right in zip(found.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(got, right)


def test_a_torch_module_in_eval_and_gradients(calls):
    """torch's attention function calls it by its global name."""
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8, requires_grad=True)
    expected = torch.autograd.grad(module(x, x, x, need_weights=False)[0].square().sum(), x)
    with fastattn.patch_sdpa():
        found = torch.autograd.grad(module(x, x, x, need_weights=False)[0].square().sum(), x)
    torch.testing.assert_close(found, expected)
    assert len(calls) == 2
