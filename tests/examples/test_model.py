"""The Transformer against the paper, and its incremental form against its parallel one."""

from __future__ import annotations

import math

import pytest
import torch

from examples.translation.config import ModelConfig, load_config
from examples.translation.model import EncoderLayer, FeedForward, Transformer, parameter_count
from examples.translation.positions import LearnedPositions, SinusoidalPositions

SMALL = {"vocab_size": 40, "layers": 2, "d_model": 16, "d_ff": 24, "heads": 2}
VARIANTS = [
    {},
    {"norm": "pre"},
    {"positions": "learned", "max_positions": 12},
    {"d_k": 3, "d_v": 5},
    {"heads": 4, "d_k": 8, "norm": "pre"},
]


def config(**changes):
    return ModelConfig(**{**SMALL, **changes})


def built(**changes):
    torch.manual_seed(0)
    return Transformer(config(**changes)).eval()


def tokens(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 40, shape, generator=generator)


def on_meta(model_config):
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(model_config).parameters())


@pytest.mark.parametrize(("name", "millions"), [("base", 63.1), ("big", 214.2)])
def test_parameter_count_of_the_paper_at_37000_subwords(name, millions):
    model_config = load_config(name).model
    assert model_config.vocab_size == 37000
    # 63.05M and 214.17M: PAPER's figures within half of their last digit, rounded up.
    assert parameter_count(model_config) / 1e6 == pytest.approx(millions, abs=0.06)
    assert parameter_count(model_config) == on_meta(model_config)


@pytest.mark.parametrize("vocab_size", [8000, 10000])
def test_parameter_count_of_tiny(vocab_size):
    model_config = load_config("tiny", [f"vocab_size={vocab_size}"]).model
    assert parameter_count(model_config) == on_meta(model_config)
    assert 2.6e6 <= parameter_count(model_config) <= 8e6


@pytest.mark.parametrize("changes", VARIANTS)
def test_parameter_count_of_variants(changes):
    model_config = config(**changes)
    assert parameter_count(model_config) == on_meta(model_config)


@pytest.mark.parametrize(
    ("row", "millions"),
    [({"d_k": 16}, 58), ({"d_k": 32}, 60), ({"layers": 2}, 36), ({"d_ff": 4096}, 90)],
)
def test_parameter_count_moves_as_in_table_3(row, millions):
    base = {"vocab_size": 37000, "d_k": 64, "d_v": 64}
    change = parameter_count(ModelConfig(**{**base, **row})) - parameter_count(ModelConfig(**base))
    # Table 3 says 65 for base, from another vocabulary; both sides are rounded to a million.
    assert change / 1e6 == pytest.approx(millions - 65, abs=1.0)


def test_vocabulary_size_is_required():
    with pytest.raises(ValueError, match="vocab_size is missing"):
        Transformer(ModelConfig())


def test_sinusoids_are_interleaved_as_in_the_paper():
    table = SinusoidalPositions(config())(50)
    for position in (0, 1, 7, 49):
        for i in range(8):
            angle = position / 10000 ** (2 * i / 16)
            assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_transformers_11958_sinusoids_grow_with_the_length():
    positions = SinusoidalPositions(config())
    start = positions(10).clone()
    assert positions(600).shape == (600, 16)
    assert torch.equal(positions(600)[:10], start)
    assert torch.equal(positions(1, 599), positions(600)[599:])
    assert built()(tokens(1, 600), tokens(1, 3)).isfinite().all()


def test_transformers_11958_learned_positions_end_with_a_clear_error():
    model = built(positions="learned", max_positions=512)
    with pytest.raises(ValueError, match="600 tokens.*512 learned positions"):
        model(tokens(1, 600), tokens(1, 3))


def test_embedding_and_positions_have_a_like_spread():
    model = built(vocab_size=1000, d_model=256)
    zero = torch.zeros(100, 256)
    ids = torch.randint(0, 1000, (1, 100), generator=torch.Generator().manual_seed(1))
    assert model.embedding(ids, zero).std().item() == pytest.approx(1, abs=0.05)
    assert 0.6 < model.encoder.positions(100).std().item() < 1


def test_one_matrix_for_source_target_and_logits():
    model = built()
    large = [name for name, p in model.named_parameters() if p.shape == (40, 16)]
    assert large == ["embedding.weight"]
    hidden = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    expected = hidden @ model.embedding.weight.T
    torch.testing.assert_close(model.embedding.logits(hidden), expected)


def test_no_biases_in_the_attention_projections():
    names = [name for name, _ in built().named_parameters() if "attention" in name]
    assert names and not [name for name in names if "bias" in name]


@pytest.mark.parametrize("changes", [{}, {"d_k": 3, "d_v": 5}])
def test_each_projection_has_the_xavier_bound_of_its_own_fan(changes):
    model = built(d_model=64, heads=4, **changes)
    attention, sizes = model.encoder.layers[0].self_attention, model.config
    keys, values = 4 * sizes.key_dim, 4 * sizes.value_dim
    matrices = [*attention.in_proj_weight.split([keys, keys, values]), attention.out_proj.weight]
    for matrix in matrices:
        bound = math.sqrt(6 / sum(matrix.shape))
        assert 0.9 * bound < matrix.abs().max().item() <= bound
    feed_forward = model.decoder.layers[1].feed_forward
    assert feed_forward.inner.weight.abs().max().item() <= math.sqrt(6 / (64 + 24))
    assert not feed_forward.inner.bias.any() and not feed_forward.outer.bias.any()


def test_post_norm_is_layer_norm_of_the_sum():
    torch.manual_seed(0)
    layer = EncoderLayer(config()).eval()
    x = torch.randn(2, 5, 16)
    attended, _ = layer.self_attention(x, x, x, need_weights=False)
    x1 = layer_norm(x + attended)
    torch.testing.assert_close(layer(x), layer_norm(x1 + layer.feed_forward(x1)))


def test_pre_norm_leaves_the_residual_path_free():
    torch.manual_seed(0)
    layer = EncoderLayer(config(norm="pre")).eval()
    x = torch.randn(2, 5, 16)
    y = layer_norm(x)
    x1 = x + layer.self_attention(y, y, y, need_weights=False)[0]
    torch.testing.assert_close(layer(x), x1 + layer.feed_forward(layer_norm(x1)))
    top = built(norm="pre").encode(tokens(2, 5))
    torch.testing.assert_close(top, layer_norm(top), atol=1e-5, rtol=0)


def layer_norm(x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6)


def test_feed_forward_is_relu_between_two_linear_maps():
    torch.manual_seed(0)
    module = FeedForward(config())
    x = torch.randn(3, 16)
    inner = (x @ module.inner.weight.T + module.inner.bias).clamp(min=0)
    torch.testing.assert_close(module(x), inner @ module.outer.weight.T + module.outer.bias)


@pytest.mark.parametrize("changes", VARIANTS)
def test_no_position_sees_a_later_target_token(changes):
    model = built(**changes)
    source, target = tokens(2, 6), tokens(2, 8, seed=2)
    changed = target.clone()
    changed[:, 5:] = tokens(2, 3, seed=3)
    before, after = model(source, target), model(source, changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], atol=1e-6, rtol=0)
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-3


@pytest.mark.parametrize("changes", VARIANTS)
def test_padding_changes_no_logit(changes):
    model = built(**changes)
    source, target = tokens(1, 6), tokens(1, 5, seed=2)
    padded = torch.cat([source, torch.zeros(1, 4, dtype=torch.long)], 1)
    longer = torch.cat([target, torch.zeros(1, 3, dtype=torch.long)], 1)
    padding = torch.tensor([[False] * 6 + [True] * 4])
    expected = model(source, target)
    torch.testing.assert_close(model(padded, target, padding), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(model(padded, longer, padding)[:, :5], expected, atol=2e-6, rtol=0)
    target_padding = torch.tensor([[False] * 5 + [True] * 3])
    masked = model(padded, longer, padding, target_padding)[:, :5]
    torch.testing.assert_close(masked, expected, atol=2e-6, rtol=0)


def test_dropout_only_in_training_and_where_the_paper_has_it():
    model = built(dropout=0.5)
    source, target = tokens(2, 6), tokens(2, 5)
    assert torch.equal(model(source, target), model(source, target))
    model.train()
    assert not torch.equal(model(source, target), model(source, target))
    # Without the sublayers' outputs what is left is the dropout of embedding + position.
    dropped = model._embed(source, model.encoder)
    kept = dropped != 0
    assert 0.3 < kept.float().mean() < 0.7
    model.eval()
    torch.testing.assert_close(dropped[kept], 2 * model._embed(source, model.encoder)[kept])


@pytest.mark.parametrize("changes", VARIANTS)
def test_cached_decoding_equals_the_whole_prefix_at_once(changes):
    model = built(**changes)
    source, padding = tokens(3, 6), torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    target = tokens(3, 9, seed=2)
    whole = model(source, target, padding)
    state = model.start(source, padding)
    for t in range(9):
        parents = torch.zeros(3, 1, dtype=torch.long)
        step = model.step(target[:, t : t + 1], parents, state)[:, 0]
        torch.testing.assert_close(step, whole[:, t], atol=1e-5, rtol=0)


def test_cached_decoding_follows_the_parents_of_a_beam():
    """30 steps of random parents and tokens, half-way two of three sentences are dropped."""
    model, beam = built(norm="pre"), 3
    source, padding = tokens(3, 6), torch.zeros(3, 6, dtype=torch.bool)
    padding[2, 3:] = True
    state = model.start(source, padding, beam)
    generator = torch.Generator().manual_seed(5)
    history = torch.empty(3, beam, 0, dtype=torch.long)
    for t in range(30):
        if t == 15:
            rows = torch.tensor([2])
            state.keep(rows)
            source, padding, history = source[rows], padding[rows], history[rows]
        batch = len(source)
        parents = torch.randint(0, beam, (batch, beam), generator=generator)
        new = torch.randint(4, 40, (batch, beam), generator=generator)
        history = torch.cat([history[torch.arange(batch)[:, None], parents], new[..., None]], 2)
        logits = model.step(new, parents, state)
        for slot in range(beam):
            whole = model(source, history[:, slot], padding)[:, -1]
            torch.testing.assert_close(logits[:, slot], whole, atol=2e-5, rtol=0)


def test_cross_attention_weights_of_every_layer_and_head():
    model = built()
    source, padding = tokens(2, 6), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    weights = model.cross_attention_weights(source, tokens(2, 5), padding)
    assert weights.shape == (2, 2, 2, 5, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 2, 5))
    assert not weights[:, 1, :, :, 4:].any()


def test_learned_positions_are_trained():
    positions = LearnedPositions(config(positions="learned", max_positions=8))
    torch.nn.init.zeros_(positions.table)
    positions(5).sum().backward()
    assert positions.table.grad.sum(1).tolist() == [16.0] * 5 + [0.0] * 3
