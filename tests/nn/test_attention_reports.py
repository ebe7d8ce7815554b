"""Faults that users reported of other implementations, each right here, on every CPU backend."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastattn
from fastattn.testing import Inputs

NEG = float("-inf")


def make(embed_dim, num_heads, *, training=False, **arguments):
    """A module whose biases are not zero, in eval unless asked."""
    module = fastattn.MultiHeadAttention(embed_dim, num_heads, **arguments)
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return module.train(training)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


def gradients_are_finite(module, output):
    output.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)


def test_pytorch_160064_head_masked_for_all_queries(backend):
    module = make(3, 3, batch_first=True)
    x = Inputs().normal(1, 5, 3)
    mask = torch.zeros(3, 5, 5, dtype=torch.bool)
    mask[1] = True
    with_weights, weights = module(x, x, x, attn_mask=mask, average_attn_weights=False)
    without, _ = module(x, x, x, attn_mask=mask, need_weights=False)
    close(without, with_weights)
    assert (weights[0, 1] == 0).all()
    close(weights[0, [0, 2]].sum(-1), torch.ones(2, 5))
    gradients_are_finite(module, with_weights + without)


def test_pytorch_152028_masked_query_with_dropout_in_training(backend):
    module = make(8, 2, training=True, dropout=0.5, batch_first=True)
    inputs = Inputs()
    query, memory = inputs.normal(2, 3, 8), inputs.normal(2, 4, 8)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[0] = True
    for need_weights in (False, True):
        output, weights = module(query, memory, memory, attn_mask=mask, need_weights=need_weights)
        assert output.isfinite().all()
        close(output[:, 0], module.out_proj.bias.expand(2, 8))
        gradients_are_finite(module, output)
    assert (weights[:, 0] == 0).all()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_pytorch_99282_100709_causal_with_weights_and_padding(backend, padded, training):
    module = make(8, 2, training=training, batch_first=True)
    x = Inputs().normal(2, 5, 8)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    given = {"key_padding_mask": padding} if padded else {}
    output, weights = module(x, x, x, is_causal=True, **given)
    without, _ = module(x, x, x, is_causal=True, need_weights=False, **given)
    expected, expected_weights = module(x, x, x, attn_mask=hidden, **given)
    close(output, expected)
    close(without, expected)
    close(weights, expected_weights)
    assert (weights.masked_select(hidden) == 0).all()
    assert not padded or (weights[1, :, 3:] == 0).all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_pytorch_97605_mask_per_head_with_padding_in_eval(backend, need_weights):
    module = make(8, 2, batch_first=True)
    inputs = Inputs()
    x = inputs.normal(3, 4, 8)
    mask = inputs.bools(6, 4, 4)
    mask[..., 0] = False
    padding = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    given = dict(attn_mask=mask, key_padding_mask=padding, need_weights=need_weights)
    with torch.no_grad():
        evaluated, _ = module.eval()(x, x, x, **given)
    trained, _ = module.train()(x, x, x, **given)
    assert torch.equal(evaluated, trained)
    for sample in range(3):
        alone, _ = module(
            *(x[sample : sample + 1],) * 3,
            attn_mask=mask[2 * sample : 2 * sample + 2] | padding[sample],
            need_weights=need_weights,
        )
        close(alone[0], trained[sample])


@pytest.mark.parametrize("need_weights", [False, True])
def test_pytorch_97128_no_bias_odd_heads_padding_in_eval(backend, need_weights):
    module = make(9, 3, bias=False, batch_first=True)
    x = Inputs().normal(2, 4, 9)
    padding = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.bool)
    with torch.no_grad():
        output, _ = module(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        shorter, _ = module(*(x[1:, :3],) * 3, need_weights=need_weights)
    close(output[1:, :3], shorter)


@pytest.mark.parametrize("need_weights", [False, True])
def test_pytorch_86120_83142_padding_in_eval_1026_tokens(backend, need_weights):
    module = make(8, 2, batch_first=True)
    x = Inputs().normal(2, 1026, 8)
    padding = torch.zeros(2, 1026, dtype=torch.bool)
    padding[1, 1000:] = True
    given = dict(key_padding_mask=padding, need_weights=need_weights)
    with torch.no_grad():
        evaluated, _ = module.eval()(x, x, x, **given)
        trained, _ = module.train()(x, x, x, **given)
        alone, _ = module.eval()(*(x[1:, :1000],) * 3, need_weights=need_weights)
    assert evaluated.shape == x.shape
    close(evaluated, trained)
    close(evaluated[1:, :1000], alone)


def test_pytorch_88806_124464_dropout_is_off_in_eval(backend):
    x = Inputs().normal(2, 5, 8)
    module = make(8, 2, dropout=0.5, batch_first=True)
    plain = fastattn.MultiHeadAttention(8, 2, batch_first=True).eval()
    plain.load_state_dict(module.state_dict())
    for need_weights in (False, True):
        output, weights = module(x, x, x, need_weights=need_weights)
        expected, expected_weights = plain(x, x, x, need_weights=need_weights)
        assert torch.equal(output, expected)
        assert not need_weights or torch.equal(weights, expected_weights)


def test_pytorch_88806_124464_dropout_in_eval_keeps_the_fused_path():
    x = Inputs().normal(2, 5, 8)
    module = make(8, 2, dropout=0.5, batch_first=True)
    assert fastattn.explain(module, x, x, x, need_weights=False).chosen != "reference"


def test_pytorch_64888_batches_that_differ_are_an_error():
    module = make(8, 2, batch_first=True)
    query, memory = torch.zeros(1, 3, 8), torch.zeros(4, 5, 8)
    with pytest.raises(ValueError, match="key is .*(4, 5, 8).* but query is .*(1, 3, 8)"):
        module(query, memory, memory)


def test_pytorch_90842_weights_are_those_after_dropout(backend):
    module = make(8, 2, training=True, dropout=0.2, batch_first=True)
    inputs = Inputs()
    query, memory = inputs.normal(4, 50, 8), inputs.normal(4, 1, 8)
    output, weights = module(query, memory, memory, average_attn_weights=False)
    dropped = weights == 0
    assert 0 < dropped.sum() < dropped.numel()
    close(weights[~dropped], torch.full_like(weights[~dropped], 1.25))
    _, value = module.project_key_value(memory, memory)
    close(output, module.merge_heads(weights @ value))


@pytest.mark.parametrize("form", ["union", "attn_mask alone", "padding alone"])
def test_pytorch_27968_41508_row_without_a_key_leaves_the_others_alone(backend, form):
    """Query 1 of sample 0 sees nothing: attn_mask hides its keys 0 and 1, padding keys 2 and 3."""
    module = make(8, 2, batch_first=True)
    x = Inputs().normal(2, 4, 8)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    padding = torch.zeros(2, 4, dtype=torch.bool)
    if form != "padding alone":
        mask[1, : 2 if form == "union" else 4] = True
    if form != "attn_mask alone":
        padding[0, 2 if form == "union" else 0 :] = True
    dead = (mask | padding[:, None]).all(-1)
    assert dead.any() and not dead.all()
    x.requires_grad_()
    output, weights = module(x, x, x, key_padding_mask=padding, attn_mask=mask)
    assert output.isfinite().all() and (weights[dead] == 0).all()
    close(output[dead], module.out_proj.bias.expand_as(output[dead]))
    for sample, query in (~dead).nonzero().tolist():
        keys = ~(mask[query] | padding[sample])
        row = x[sample : sample + 1, query : query + 1]
        alone, _ = module(row, *(x[sample : sample + 1, keys],) * 2)
        close(output[sample, query], alone[0, 0])
    output[~dead].sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_pytorch_107084_float_mask_in_eval_is_added(backend, need_weights):
    module = make(8, 2, batch_first=True)
    inputs = Inputs()
    x, mask = inputs.normal(2, 4, 8), inputs.normal(4, 4)
    with torch.no_grad():
        evaluated, _ = module.eval()(x, x, x, attn_mask=mask, need_weights=need_weights)
    trained, _ = module.train()(x, x, x, attn_mask=mask, need_weights=need_weights)
    unmasked, _ = module(x, x, x, need_weights=need_weights)
    close(evaluated, trained)
    assert (evaluated - unmasked).abs().max() > 1e-2


@pytest.mark.parametrize("training", [False, True])
def test_pytorch_136816_float_padding_is_added_to_its_keys(backend, training):
    module = make(8, 2, training=training, batch_first=True)
    inputs = Inputs()
    x, bias = inputs.normal(2, 4, 8), inputs.normal(2, 4)
    output, weights = module(x, x, x, key_padding_mask=bias)
    as_mask = bias[:, None, None].expand(2, 2, 4, 4).flatten(0, 1)
    expected, expected_weights = module(x, x, x, attn_mask=as_mask)
    close(output, expected)
    close(weights, expected_weights)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("length", [5, 43])
def test_xformers_813_683_masks_of_odd_widths_and_strides(backend, length, kind):
    module = make(8, 2, batch_first=True)
    inputs = Inputs()
    x = inputs.normal(2, length, 8)
    wide = inputs.bools(4, length, length + 3) if kind == "bool" else inputs.normal(4, length, 50)
    mask = wide[..., 1 : length + 1]
    if kind == "bool":
        mask[..., 0] = False
    output, _ = module(x, x, x, attn_mask=mask)
    without, _ = module(x, x, x, attn_mask=mask, need_weights=False)
    expected, _ = module(x, x, x, attn_mask=mask.contiguous())
    close(output, expected)
    close(without, expected)


def test_xformers_1122_mask_of_another_length_names_both():
    module = make(8, 2, batch_first=True)
    x = torch.zeros(1, 10, 8)
    with pytest.raises(ValueError, match=r"attn_mask is .*\(20, 20\).*\(10, 10\)"):
        module(x, x, x, attn_mask=torch.zeros(20, 20, dtype=torch.bool))


@pytest.mark.parametrize(
    "alignment, rows",
    [("top_left", ["10000", "11000"]), ("bottom_right", ["11110", "11111"])],
)
def test_flash_attention_282_402_causal_with_more_keys_than_queries(backend, alignment, rows):
    module = make(8, 2, batch_first=True, causal_alignment=alignment)
    inputs = Inputs()
    query, memory = inputs.normal(1, 2, 8), inputs.normal(1, 5, 8)
    output, weights = module(query, memory, memory, is_causal=True)
    expected = torch.tensor([[c == "1" for c in row] for row in rows])
    assert torch.equal(weights[0] > 0, expected)
    as_mask, _ = module(query, memory, memory, attn_mask=~expected)
    close(output, as_mask)


def test_pytorch_103963_rows_with_no_key_are_zero(backend):
    module = make(8, 1, batch_first=True)
    x = Inputs().normal(1, 8, 8)
    keep = torch.zeros(8, 8, dtype=torch.bool)
    keep[:4, :4] = True
    for need_weights in (False, True):
        output, _ = module(x, x, x, attn_mask=~keep, need_weights=need_weights)
        close(output[0, 4:], module.out_proj.bias.expand(4, 8))
        gradients_are_finite(module, output)


def test_pytorch_125674_equal_inputs_of_1000(backend):
    module = make(1024, 16, training=True, batch_first=True)
    x = torch.full((1, 50, 1024), 1000.0)
    output, weights = module(x, x, x)
    assert output.isfinite().all()
    close(weights, torch.full_like(weights, 1 / 50))
    gradients_are_finite(module, output)


def test_pytorch_99012_float32_mask_under_autocast(backend):
    module = make(256, 8, batch_first=True)
    inputs = Inputs()
    x, mask = inputs.normal(2, 64, 256), inputs.normal(64, 64)
    expected, _ = module(x, x, x, attn_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        for need_weights in (False, True):
            output, _ = module(x, x, x, attn_mask=mask, need_weights=need_weights)
            assert output.dtype == torch.bfloat16
            torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)
