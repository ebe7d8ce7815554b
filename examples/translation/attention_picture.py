"""Draws what the decoder looks at: encoder-decoder attention of one sentence, as a PNG.

    python -m examples.translation.attention_picture --run RUN --text "A dog runs." --out x.png
        [--translation "Ein Hund rennt."] [--layer 4]

A row is a token that the decoder is about to write, a column a token of the source; a row sums
to 1. The big panel is the mean of the layer's heads, the small ones are the heads.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from examples.translation.checkpoint import CheckpointError
from examples.translation.cli import ArgumentParser
from examples.translation.data import BOS, EOS, Tokenizer
from examples.translation.translate import Translator

MAX_TOKENS = 60
MAX_SMALL_TOKENS = 24  # beyond it the heads' labels could not be read
_END = "⟨end⟩"


def attention_weights(
    model: torch.nn.Module, tokenizer: Tokenizer, source: str, translation: str
) -> tuple[np.ndarray, list[str], list[str]]:
    """Weights [N, h, T, S] of all decoder layers and heads, with the T target and S source tokens.

    Row t is where the decoder looks to predict target token t; the last one is the end.
    Raises ValueError where a side has no token, or more than MAX_TOKENS.
    """
    sides = [tokenizer.encode(text) for text in (source, translation)]
    for name, ids in zip(("source", "translation"), sides, strict=True):
        if not 0 < len(ids) <= MAX_TOKENS:
            raise ValueError(f"the {name} has {len(ids)} tokens, a picture takes 1 to {MAX_TOKENS}")
    device = next(model.parameters()).device
    source_ids = torch.tensor([[*sides[0], EOS]], device=device)
    target_ids = torch.tensor([[BOS, *sides[1]]], device=device)
    training = model.training
    model.eval()
    weights = model.cross_attention_weights(source_ids, target_ids)[:, 0]
    model.train(training)
    source_tokens, target_tokens = ([*_labels(tokenizer, ids), _END] for ids in sides)
    return weights.float().cpu().numpy(), target_tokens, source_tokens


def draw(
    weights: np.ndarray,
    target_tokens: Sequence[str],
    source_tokens: Sequence[str],
    out: str | Path,
    title: str = "",
) -> None:
    """Writes a PNG of one layer's weights [h, T, S]: the mean of the heads, then each head."""
    heads, rows, columns = weights.shape
    if (rows, columns) != (len(target_tokens), len(source_tokens)):
        raise ValueError(
            f"weights of {rows} x {columns} do not fit {len(target_tokens)} target "
            f"and {len(source_tokens)} source tokens"
        )
    across = min(heads, 4)
    down = math.ceil(heads / across)
    width, height = (max(7.0, 0.32 * columns + 2), max(4.0, 0.27 * rows + 1.6))
    small = width / across * min(1.2, rows / columns) + 0.35
    figure = plt.figure(figsize=(width, height + down * small), layout="constrained")
    grid = figure.add_gridspec(1 + down, across, height_ratios=[height, *[small] * down])

    mean = figure.add_subplot(grid[0, :])
    average = weights.mean(0)
    image = _panel(mean, average, f"mean of {heads} heads", average.max())
    _label(mean.xaxis, source_tokens, rotation=60, ha="right", rotation_mode="anchor")
    _label(mean.yaxis, target_tokens)
    mean.set(xlabel="source", ylabel="translation")
    figure.colorbar(image, ax=mean, label="weight of the mean", fraction=0.04)
    for head in range(heads):
        axes = figure.add_subplot(grid[1 + head // across, head % across])
        _panel(axes, weights[head], f"head {head + 1}", 1.0)
        readable = max(rows, columns) <= MAX_SMALL_TOKENS
        lowest, leftmost = head + across >= heads, head % across == 0
        _label(axes.xaxis, source_tokens if readable and lowest else [], rotation=90, fontsize=6)
        _label(axes.yaxis, target_tokens if readable and leftmost else [], fontsize=6)
    if title:
        figure.suptitle(title, fontsize=11, parse_math=False)
    figure.savefig(out, dpi=120, metadata={"Software": "fastattn"})
    plt.close(figure)


def _panel(axes: plt.Axes, weights: np.ndarray, title: str, top: float):
    axes.set_title(title, fontsize=10)
    return axes.imshow(weights, cmap="Blues", vmin=0, vmax=top, aspect="auto")


def _label(axis, tokens: Sequence[str], **options) -> None:
    # "$" is a dollar here, not the start of a formula.
    axis.set_ticks(range(len(tokens)), tokens, parse_math=False, **options)


def _labels(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Subwords as in the sentence; "·" goes before one that continues a word."""
    pieces = tokenizer.pieces(ids)
    return [piece[1:] or "▁" if piece.startswith("▁") else f"·{piece}" for piece in pieces]


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="attention_picture", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--run", required=True, help="folder that train wrote")
    parser.add_argument("--text", required=True, help="source sentence")
    parser.add_argument("--translation", help="default: what the model says")
    parser.add_argument("--layer", type=int, help="of the decoder, from 1 (default: the last)")
    parser.add_argument("--out", required=True, type=Path, help="PNG to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        translator = Translator.load(options.run, device=options.device)
        layers = translator.config.model.layers
        layer = layers if options.layer is None else options.layer
        if not 1 <= layer <= layers:
            raise ValueError(f"--layer must be 1 to {layers}, not {layer}")
        translation = options.translation or translator.translate([options.text])[0]
        weights, target_tokens, source_tokens = attention_weights(
            translator.model, translator.tokenizer, options.text, translation
        )
        title = f"decoder layer {layer} of {layers}: where it looks for each token"
        draw(weights[layer - 1], target_tokens, source_tokens, options.out, title)
    except (CheckpointError, ValueError, OSError) as error:
        print(f"attention_picture: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {translation}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
