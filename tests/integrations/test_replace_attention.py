"""replace_attention: torch's Transformer on fastattn, the same numbers, and back."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import fastattn
from fastattn.nn import multi_head_attention
from fastattn.testing import Inputs

WIDTH, HEADS = 8, 2
PADDING = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]).bool()
CAUSAL = torch.ones(4, 4).triu(1).bool()
MASKS = {
    "none": {},
    "bool": dict(src_key_padding_mask=PADDING, memory_key_padding_mask=PADDING, tgt_mask=CAUSAL),
    "float": dict(
        src_mask=torch.eye(5, dtype=torch.float64),
        memory_mask=torch.ones(4, 5, dtype=torch.float64).tril(),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64),
        tgt_is_causal=True,
    ),
}


class CustomLayer(nn.TransformerEncoderLayer):
    """A user's layer: it inherits torch's forward, and with it torch's kernel for eval."""


@pytest.fixture
def calls(monkeypatch):
    """Calls of fastattn's attention and fused LayerNorm, by name."""
    seen = []
    for module, name in (
        (multi_head_attention, "scaled_dot_product_attention"),
        (fastattn.integrations._layers, "add_layer_norm"),
    ):
        monkeypatch.setattr(module, name, counting(getattr(module, name), name, seen))
    return seen


def counting(function, name, seen):
    def called(*args, **kwargs):
        seen.append(name)
        return function(*args, **kwargs)

    return called


def transformer(**arguments):
    arguments = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64, **arguments}
    return nn.Transformer(WIDTH, HEADS, 2, 2, 16, **arguments)


def sequences(model):
    inputs = Inputs()
    source, target = (inputs.normal(2, length, WIDTH, dtype=torch.float64) for length in (5, 4))
    if not model.batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    return source.requires_grad_(), target.requires_grad_()


def run(model, masks, grad=True):
    source, target = sequences(model)
    with nullcontext() if grad else torch.no_grad():
        output = model(source, target, **masks)
    if not grad:
        return [output]
    return [output, *torch.autograd.grad(output.square().sum(),
                                         [source, target, *model.parameters()])]  # fmt: skip


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_keeps_its_numbers_and_gradients(calls, norm_first, batch_first, masks):
    model = transformer(norm_first=norm_first, batch_first=batch_first)
    expected = run(model, MASKS[masks])
    replacements = fastattn.replace_attention(model)
    torch.testing.assert_close(run(model, MASKS[masks]), expected)
    assert calls.count("scaled_dot_product_attention") == 2 + 2 * 2
    assert calls.count("add_layer_norm") == 2 * 2 + 2 * 3
    replacements.undo()
    torch.testing.assert_close(run(model, MASKS[masks]), expected, rtol=0, atol=0)
    assert len(calls) == 6 + 10


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_eval_calls_fastattn_where_torch_takes_a_kernel_for_the_layer(calls, norm_first, masks):
    """Under no_grad too, and with padding, for which torch's encoder makes nested tensors."""
    model = transformer(norm_first=norm_first)
    expected = run(model, MASKS[masks])[:1]
    fastattn.replace_attention(model.eval())
    torch.testing.assert_close(run(model, MASKS[masks], grad=False), expected)
    assert calls.count("scaled_dot_product_attention") == 6
    assert calls.count("add_layer_norm") == 10


def test_padded_positions_keep_their_place_in_eval():
    """torch's encoder shortens a batch in eval whose last position is padding in every row."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    fastattn.replace_attention(encoder.eval())
    padding = torch.tensor([[0, 0, 1], [0, 1, 1]]).bool()
    with torch.no_grad():
        assert encoder(torch.randn(2, 3, 8), src_key_padding_mask=padding).shape == (2, 3, 8)


def test_a_padded_row_is_no_nan_and_leaks_into_no_other():
    model = transformer()
    fastattn.replace_attention(model)
    source, target = sequences(model)
    with torch.no_grad():
        source[:, 4] = float("nan")
    masks = {**MASKS["bool"]}
    output = model(source, target, **masks)
    assert output.isfinite().all()


@pytest.mark.parametrize("norm_first", [True, False])
def test_dropout_falls_on_the_sublayers_in_training_alone(norm_first):
    """A probability of 1, where torch's random numbers and ours agree."""
    model = transformer(norm_first=norm_first, dropout=1.0)
    expected = run(model, {})
    fastattn.replace_attention(model)
    torch.testing.assert_close(run(model, {}), expected)
    model.eval()
    evaluated = run(model, {})[:1]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    torch.testing.assert_close(run(model, {})[:1], evaluated, rtol=0, atol=0)


def test_dropout_is_repeated_by_a_seed():
    model = transformer(dropout=0.5)
    fastattn.replace_attention(model)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(run(model, MASKS["bool"]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert not torch.equal(found[0][0], found[2][0])


def test_everything_about_the_modules_is_kept():
    model = transformer(dtype=torch.float32)
    model.decoder.layers[1].self_attn.in_proj_weight = model.encoder.layers[
        0
    ].self_attn.in_proj_weight
    model.encoder.layers[0].eval()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    identities = [id(x) for x in (*model.modules(), *model.parameters())]
    replacements = fastattn.replace_attention(model)
    assert isinstance(model.decoder.layers[0].multihead_attn, fastattn.MultiHeadAttention)
    assert [id(x) for x in (*model.modules(), *model.parameters())] == identities
    assert not model.encoder.layers[0].training and model.encoder.layers[1].training
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    transformer(dtype=torch.float32).load_state_dict(model.state_dict())
    replacements.undo()
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
    assert {type(m).__module__.split(".")[0] for m in model.modules()} == {"torch"}
    replacements.undo()


@pytest.mark.parametrize("name", ["self_attn", "norm1", "dropout1", "norm2"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_hooks_are_called(name, when, norm_first):
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 16, 0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    ).eval()
    x = sequences(transformer())[0]
    seen = []
    if when == "after":
        fastattn.replace_attention(layer)
    layer.get_submodule(name).register_forward_hook(lambda *given: seen.append(given))
    expected = layer(x)
    if when == "before":
        fastattn.replace_attention(layer)
        torch.testing.assert_close(layer(x), expected)
        assert len(seen) == 2
    else:
        layer(x)
        assert len(seen) == 2


def test_a_copy_and_a_pickle_are_replaced_too(calls):
    model = transformer()
    expected = run(model, {})
    replacements = fastattn.replace_attention(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    copied = copy.deepcopy(model)
    replacements.undo()
    for other in (loaded, copied):
        calls.clear()
        torch.testing.assert_close(run(other, {}), expected)
        assert len(calls) == 16


def test_a_dry_run_changes_nothing_and_says_the_same():
    model = transformer()
    kinds = [type(m) for m in model.modules()]
    planned = fastattn.replace_attention(model, dry_run=True)
    assert [type(m) for m in model.modules()] == kinds
    done = fastattn.replace_attention(model)
    assert planned.entries == done.entries and len(done.replaced) == 2 + 2 * 2 + 2 * 3
    assert str(planned).replace("would be replaced", "replaced").split() == str(done).split()


def test_the_table_says_what_was_left_and_why():
    class Own(nn.MultiheadAttention):
        pass

    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
    layer.norm2.register_forward_hook(lambda *given: None)
    wrapped = nn.MultiheadAttention(WIDTH, HEADS)
    wrapped.forward = wrapped.forward
    foreign = nn.TransformerDecoderLayer(WIDTH, HEADS, 16)
    foreign.multihead_attn = nn.Identity()
    model = nn.ModuleDict({
        "layer": layer,
        "own": Own(WIDTH, HEADS),
        "wrapped": wrapped,
        "foreign": foreign,
        "ours": fastattn.MultiHeadAttention(WIDTH, HEADS),
    })  # fmt: skip
    found = fastattn.replace_attention(model)
    assert found.replaced == ["layer", "layer.self_attn", "foreign.self_attn"]
    assert found.left == {
        "own": "a subclass of MultiheadAttention, whose code stays",
        "wrapped": "its forward was replaced",
        "foreign": "multihead_attn is left",
        "ours": "fastattn's already",
    }
    assert "norm2 has hooks: not fused" in str(found)
    assert str(found).splitlines()[-1] == "3 replaced, 4 left"
    assert "(model)" in str(fastattn.replace_attention(nn.MultiheadAttention(WIDTH, HEADS)))


def test_a_subclass_of_a_layer_keeps_its_code_and_its_attention_is_called_in_eval(calls):
    layers = nn.TransformerEncoder(CustomLayer(WIDTH, HEADS, 16, 0.0, batch_first=True), 2).eval()
    x = torch.randn(2, 5, WIDTH)
    found = fastattn.replace_attention(layers)
    assert found.replaced == ["layers.0.self_attn", "layers.1.self_attn"]
    assert found.left[""] == "layers.0 is left"
    with torch.no_grad():
        output = layers(x, src_key_padding_mask=PADDING)
    assert calls == ["scaled_dot_product_attention"] * 2
    found.undo()
    torch.testing.assert_close(layers(x, src_key_padding_mask=PADDING), output)


@pytest.mark.parametrize("norm_first", [True, False])
def test_autocast_gives_torchs_dtype(norm_first):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.0, norm_first=norm_first)
    x = torch.randn(5, 2, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        fastattn.replace_attention(layer)
        found = layer(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)


def test_a_norm_of_another_kind_is_called():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.0, batch_first=True)
    layer.norm1 = nn.RMSNorm(WIDTH)
    x = torch.randn(2, 5, WIDTH)
    expected = layer(x)
    assert "norm1 is a RMSNorm: not fused" in str(fastattn.replace_attention(layer))
    torch.testing.assert_close(layer(x), expected)


def test_compiles_whole():
    model = transformer(dtype=torch.float32)
    fastattn.replace_attention(model)
    source, target = (x.detach().float() for x in sequences(model))
    expected = model(source, target, **MASKS["bool"])
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(source, target, **MASKS["bool"]), expected)


def test_anything_but_a_module_is_refused():
    with pytest.raises(TypeError, match="model is a list; a torch.nn.Module is accepted"):
        fastattn.replace_attention([])
