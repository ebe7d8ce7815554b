"""The attention picture."""

from __future__ import annotations

import matplotlib.image
import numpy as np
import pytest
import torch

from examples.translation.attention_picture import attention_weights, draw, main
from examples.translation.translate import Translator


@pytest.fixture(scope="module")
def translator(toy_run):
    return Translator.load(toy_run)


def test_weights_have_a_row_for_each_token_and_the_end(translator):
    weights, target, source = attention_weights(
        translator.model, translator.tokenizer, "a b c d", "d c b a"
    )
    assert source == ["a", "b", "c", "d", "⟨end⟩"]
    assert target == ["d", "c", "b", "a", "⟨end⟩"]
    config = translator.config.model
    assert weights.shape == (config.layers, config.heads, len(target), len(source))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_weights_are_those_of_a_model_that_reverses(translator):
    """Some head of the trained toy looks at the letter that it is about to write."""
    weights, _, _ = attention_weights(
        translator.model, translator.tokenizer, "a b c d e f", "f e d c b a"
    )
    looked_at = weights[:, :, :6].argmax(-1)
    hits = (looked_at == np.arange(6)[::-1]).sum(-1)
    assert hits.max() >= 5


def test_the_model_keeps_its_mode(translator):
    translator.model.train()
    attention_weights(translator.model, translator.tokenizer, "a b", "b a")
    assert translator.model.training
    translator.model.eval()


@pytest.mark.parametrize(("source", "message"), [(" ", "0 tokens"), ("a " * 61, "61 tokens")])
def test_sentences_that_do_not_fit(translator, source, message):
    with pytest.raises(ValueError, match=f"the source has {message}, a picture takes 1 to 60"):
        attention_weights(translator.model, translator.tokenizer, source, "a")


@pytest.mark.parametrize("shape", [(1, 1, 2), (4, 3, 9), (5, 28, 12)])
def test_draws_the_weights(tmp_path, shape):
    """Where the weights change, the picture does; a weight of 1 is dark, of 0 light."""
    heads, rows, columns = shape
    weights = np.zeros(shape)
    weights[:, :, 0] = 1
    labels = [f"t{i}" for i in range(rows)], [f"s{i}" for i in range(columns)]
    draw(weights, *labels, tmp_path / "first.png")
    draw(weights[:, :, ::-1], *labels, tmp_path / "last.png")
    first, last = (
        matplotlib.image.imread(tmp_path / f"{n}.png")[..., :3] for n in ("first", "last")
    )
    assert first.shape == last.shape and min(first.shape[:2]) > 300
    dark = [(image[..., 2] - image[..., 0] > 0.3).mean(0) for image in (first, last)]
    middle = [np.average(np.arange(len(d)), weights=d + 1e-9) for d in dark]
    assert dark[0].max() > 0.1 and middle[0] < middle[1]


def test_weights_and_tokens_must_fit(tmp_path):
    with pytest.raises(ValueError, match="2 x 3 do not fit 2 target and 2 source tokens"):
        draw(np.zeros((1, 2, 3)), ["a", "b"], ["c", "d"], tmp_path / "x.png")


def test_dollars_are_no_formulas(tmp_path, translator):
    with torch.no_grad():
        draw(np.ones((2, 1, 1)), ["$x_$"], ["\\frac$"], tmp_path / "x.png", "$5 and $6")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_command(toy_run, tmp_path, capsys):
    out = tmp_path / "x.png"
    arguments = ["--run", str(toy_run), "--device", "cpu", "--out", str(out)]
    assert main([*arguments, "--text", "a b c"]) == 0
    assert capsys.readouterr().out == f"{out}: c b a\n"
    first = out.read_bytes()
    assert main([*arguments, "--text", "a b c", "--translation", "c b a"]) == 0
    assert out.read_bytes() == first
    assert main([*arguments, "--text", "a b c", "--layer", "1"]) == 0
    assert out.read_bytes() != first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "3"], "--layer must be 1 to 2, not 3"),
        (["--run", "nowhere"], "no run folder at nowhere"),
        (["--text", ""], "the source has 0 tokens"),
        (["--out", "/nowhere/x.png"], "No such file or directory"),
    ],
)
def test_bad_input_costs_one_sentence(toy_run, tmp_path, capsys, arguments, message):
    given = ["--run", str(toy_run), "--text", "a b", "--out", str(tmp_path / "x.png")]
    assert main([*given, "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("attention_picture: ")
    assert error.count("\n") == 1
