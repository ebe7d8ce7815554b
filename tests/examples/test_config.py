"""Configurations: what is read, and what a mistake is answered with."""

from __future__ import annotations

import dataclasses

import pytest

from examples.translation.config import (
    Config,
    ConfigError,
    ModelConfig,
    SearchConfig,
    TrainingConfig,
    load_config,
)


def written(tmp_path, text):
    file = tmp_path / "mine.toml"
    file.write_text(text, "utf-8")
    return file


def test_base_is_the_paper():
    config = load_config("base")
    model, training, search = config.model, config.training, config.search
    assert (model.layers, model.d_model, model.d_ff, model.heads) == (6, 512, 2048, 8)
    assert (model.key_dim, model.value_dim, model.dropout, model.norm) == (64, 64, 0.1, "post")
    assert (model.attention_dropout, model.relu_dropout, model.norm_eps) == (0.0, 0.0, 1e-6)
    assert (training.warmup_steps, training.max_steps, training.lr_factor) == (4000, 100_000, 1.0)
    assert (training.adam_beta1, training.adam_beta2, training.adam_eps) == (0.9, 0.98, 1e-9)
    assert (training.label_smoothing, training.smoothing) == (0.1, "exclusive")
    assert (training.tokens_per_update, training.keep_checkpoints) == (25000, 5)
    assert (search.beam, search.alpha, search.length_penalty) == (4, 0.6, "gnmt")
    assert search.extra_length == 50


def test_big_differs_from_base_as_in_table_3():
    base, big = load_config("base"), load_config("big")
    model = {"d_model": 1024, "d_ff": 4096, "heads": 16, "dropout": 0.3}
    assert big.model == dataclasses.replace(base.model, **model)
    assert (big.training.max_steps, big.training.keep_checkpoints) == (300_000, 20)
    assert big.search == base.search


@pytest.mark.parametrize("name", ["tiny", "base", "big"])
def test_toml_and_dict_round_trip(name, tmp_path):
    config = load_config(name)
    assert load_config(written(tmp_path, config.to_toml())) == config
    assert Config.from_dict(dataclasses.asdict(config)) == config


def test_missing_keys_are_the_defaults(tmp_path):
    config = load_config(written(tmp_path, "[model]\nlayers = 2\n"))
    assert config.model == ModelConfig(layers=2)
    assert (config.training, config.search) == (TrainingConfig(), SearchConfig())


@pytest.mark.parametrize(
    ("override", "table", "key", "value"),
    [
        ("dropout=0.25", "model", "dropout", 0.25),
        ("model.dropout = 0.25", "model", "dropout", 0.25),
        ("training.max_steps=7", "training", "max_steps", 7),
        ("norm=pre", "model", "norm", "pre"),
        ('length_penalty="average"', "search", "length_penalty", "average"),
        ("lr_factor=2", "training", "lr_factor", 2.0),
        ("vocab_size=8000", "model", "vocab_size", 8000),
    ],
)
def test_overrides(override, table, key, value):
    config = load_config("tiny", [override])
    assert getattr(getattr(config, table), key) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\nlayer = 2", ["mine.toml", "'layer'", "[model]", "layers, d_model"]),
        ("[modell]\nlayers = 2", ["mine.toml", "'modell'", "model, training, search"]),
        ("layers = 2", ["mine.toml", "'layers'"]),
        ("model = 2", ["model must be a table", "2"]),
        ("[model]\nlayers = 2.5", ["layers must be a whole number", "2.5"]),
        ("[model]\nlayers = true", ["layers must be a whole number", "True"]),
        ('[model]\ndropout = "high"', ["dropout must be a number", "'high'"]),
        ("[model]\nnorm = 1", ["norm must be text", "1"]),
        ("[model]\nlayers = 0", ["mine.toml", "layers must be positive", "0"]),
        ("[model]\ndropout = 1.0", ["dropout", "below 1", "1.0"]),
        ('[model]\nnorm = "middle"', ["norm must be 'post' or 'pre'", "'middle'"]),
        ('[model]\npositions = "none"', ["positions", "'sinusoidal' or 'learned'", "'none'"]),
        ("[model]\nheads = 7", ["d_model 512", "heads 7", "d_k"]),
        ("[model]\nd_model = 33\nheads = 3", ["d_model must be even", "33"]),
        ("[training]\nlabel_smoothing = -0.1", ["label_smoothing", "-0.1"]),
        ('[training]\nsmoothing = "both"', ["'exclusive' or 'uniform'", "'both'"]),
        ('[training]\nprecision = "fp8"', ["'fp32', 'bf16' or 'auto'", "'fp8'"]),
        ("[training]\nwarmup_steps = 0", ["warmup_steps must be positive"]),
        ("[search]\nbeam = 0", ["beam must be positive"]),
        ("[search]\nalpha = -1.0", ["alpha must be at least 0", "-1.0"]),
        ('[search]\nlength_penalty = "wu"', ["'gnmt' or 'average'", "'wu'"]),
        ("[model\n", ["mine.toml", "no TOML"]),
    ],
)
def test_a_bad_file_costs_one_sentence(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text))
    message = str(caught.value)
    assert "\n" not in message.strip()
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("dropuot=0.1", ["'dropuot'", "dropout", "accepted"]),
        ("model.beam=4", ["'beam'", "[model]"]),
        ("speed.beam=4", ["'speed'", "model, training, search"]),
        ("dropout", ["key=value", "'dropout'"]),
        ("=3", ["key=value"]),
        ("layers=two", ["layers must be a whole number", "'two'"]),
    ],
)
def test_a_bad_override_costs_one_sentence(override, words):
    with pytest.raises(ConfigError) as caught:
        load_config("base", [override])
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_missing_file_names_the_built_in_ones():
    with pytest.raises(ConfigError, match="no config file small.*base, big, tiny"):
        load_config("small")


def test_head_dims_free_the_width():
    assert ModelConfig(d_model=100, heads=8, d_k=7, d_v=9).key_dim == 7
