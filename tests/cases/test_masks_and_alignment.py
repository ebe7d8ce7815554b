"""Causal alignment and masks as users needed them elsewhere, right here on every backend."""

from __future__ import annotations

import pytest
import torch

import fastattn
from fastattn.testing import Inputs, backends, with_layout
from tests.harness import run_on
from tests.ops.attention_cases import compare

BACKENDS = pytest.mark.parametrize("backend", backends("attention"))
attention = fastattn.scaled_dot_product_attention


@BACKENDS
@pytest.mark.parametrize(
    ("alignment", "rows"), [("top_left", ["10000", "11000"]), ("bottom_right", ["11110", "11111"])]
)
def test_flash_attention_282_402_two_queries_five_keys(backend, alignment, rows):
    query, key, value = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4), torch.eye(5)[None, None]
    out = run_on(backend, attention, query, key, value, is_causal=True, causal_alignment=alignment)
    assert ["".join("01"[bool(x)] for x in row) for row in out[0, 0]] == rows


def test_xformers_1122_a_mask_for_20_keys_where_there_are_10():
    query = torch.zeros(1, 2, 10, 8)
    with pytest.raises(ValueError, match=r"attn_mask .*\(1, 2, 10, 20\).*\(1, 2, 10, 10\)"):
        attention(query, query, query, torch.zeros(1, 2, 10, 20))


@BACKENDS
@pytest.mark.parametrize("kv_len", [5, 43])
@pytest.mark.parametrize("kind", ["float", "bool", "half"])
@pytest.mark.parametrize("layout", ["contiguous", "offset", "strided", "transposed"])
def test_xformers_813_683_biases_of_odd_widths_and_strides(backend, kv_len, kind, layout):
    inputs = Inputs()
    dtype = torch.bfloat16 if kind == "half" else torch.float32
    query, key, value = (inputs.normal(2, 2, n, 16, dtype=dtype) for n in (7, kv_len, kv_len))
    bias = inputs.normal(2, 2, 7, kv_len, dtype=dtype)
    compare(backend, query, key, value, with_layout(bias > 0 if kind == "bool" else bias, layout))


@BACKENDS
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_pytorch_27968_41508_a_row_hidden_by_two_masks_together(backend, kind):
    inputs = Inputs()
    query, key, value = (inputs.normal(2, 2, 4, 8) for _ in range(3))
    seen = torch.ones(4, 4, dtype=torch.bool)
    seen[1, :2] = False  # with sample 0's padding of keys 2 and 3, query 1 there sees nothing
    mask = seen if kind == "bool" else torch.zeros(4, 4).masked_fill(~seen, -torch.inf)
    padding = torch.tensor([[False, False, True, True], [False] * 4])
    out, grads = compare(backend, query, key, value, mask, key_padding_mask=padding)
    assert not out[0, :, 1].any() and not grads[0][0, :, 1].any()
    assert all(g.isfinite().all() for g in grads if g is not None)
    alone, _ = compare(backend, query[1:], key[1:], value[1:], mask)
    torch.testing.assert_close(out[1:], alone)


@BACKENDS
def test_pytorch_107084_a_float_mask_without_gradients(backend):
    inputs = Inputs()
    tensors = [inputs.normal(2, 2, 5, 8).requires_grad_() for _ in range(3)]
    mask = inputs.normal(5, 5)
    trained = run_on(backend, attention, *tensors, mask)
    with torch.no_grad():
        evaluated = run_on(backend, attention, *tensors, mask)
        plain = run_on(backend, attention, *tensors)
    torch.testing.assert_close(evaluated, trained)
    assert not torch.allclose(evaluated, plain)


@BACKENDS
@pytest.mark.parametrize("beside", ["nothing", "bool", "float"])
def test_pytorch_136816_a_float_padding_mask_is_added_to_its_keys(backend, beside):
    inputs = Inputs()
    query, key, value = (inputs.normal(2, 3, n, 8) for n in (4, 6, 6))
    padding = inputs.normal(2, 6)
    padding[1, 4:] = -torch.inf
    mask = {"nothing": None, "bool": inputs.bools(4, 6, true=0.8), "float": inputs.normal(4, 6)}[
        beside
    ]
    added = padding[:, None, None, :]
    if beside == "bool":
        added = added.masked_fill(~mask, -torch.inf)
    elif beside == "float":
        added = added + mask
    right = run_on(backend, attention, query, key, value, added)
    out = run_on(backend, attention, query, key, value, mask, key_padding_mask=padding)
    assert torch.equal(out, right)
