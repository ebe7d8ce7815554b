"""Translates text, one line out for each line in (paper section 6.1).

    python -m examples.translation.translate --run RUN [--input FILE] [--output FILE]
        [--beam 4] [--alpha 0.6] [--n-best 1]

Reads stdin and writes stdout by default, in the order of the input and as the input comes. Only
``\\n`` ends a line. An empty line, or one of spaces, gives an empty line without asking the model;
a line longer than the model was trained for is cut, with a warning on stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from examples.translation.checkpoint import CheckpointError, CheckpointFolder, load_checkpoint
from examples.translation.cli import ArgumentParser
from examples.translation.config import Config, SearchConfig
from examples.translation.data import EOS, PAD, Tokenizer
from examples.translation.model import Transformer
from examples.translation.search import Hypothesis, beam_search


def _to_stderr(text: str) -> None:
    print(f"translate: {text}", file=sys.stderr)


class Translator:
    """A trained model with its subwords and its search.

    `warn` gets a sentence for each line that had to be cut.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        config: Config,
        warn: Callable[[str], None] = _to_stderr,
    ):
        self.model, self.tokenizer, self.config, self.warn = model.eval(), tokenizer, config, warn

    @classmethod
    def load(
        cls, run: str | Path, checkpoint: str | Path | None = None, device: str = "cpu"
    ) -> Translator:
        """Reads RUN/averaged.pt, else the run's newest checkpoint, unless `checkpoint` names one.

        Raises CheckpointError where there is none or it does not fit the run's subword model.
        """
        run = Path(run)
        if not run.is_dir():
            raise CheckpointError(f"no run folder at {run}")
        averaged = run / "averaged.pt"
        newest = averaged if averaged.is_file() else CheckpointFolder(run / "checkpoints").newest()
        file = checkpoint or newest
        if file is None:
            raise CheckpointError(f"{run} holds no checkpoint yet")
        state = load_checkpoint(file)
        config = Config.from_dict(state["config"], str(file))
        tokenizer = Tokenizer(run / "spm.model")
        if tokenizer.vocab_size != config.model.vocab_size:
            raise CheckpointError(
                f"{file} has a vocabulary of {config.model.vocab_size}, but {run / 'spm.model'} "
                f"has {tokenizer.vocab_size}"
            )
        model = Transformer(config.model)
        model.load_state_dict(state["model"])
        return cls(model.to(device), tokenizer, config)

    def translate(self, lines: Sequence[str], batch_size: int = 64) -> list[str]:
        """One translation a line, in order; empty for a line without a visible character."""
        return [self.text(best[0]) if best else "" for best in self.search(lines, batch_size)]

    def search(
        self, lines: Sequence[str], batch_size: int = 64, n_best: int = 1, first_line: int = 1
    ) -> list[list[Hypothesis]]:
        """The `n_best` hypotheses of each line, best first; none for a line without text.

        `first_line` is the number of lines[0] in warnings. Lines of like length share a batch;
        in fp32 its size does not change the text.
        """
        sources = [
            self._cut(ids, first_line + number)
            for number, ids in enumerate(self.tokenizer.encode_batch(list(lines)))
        ]
        order = sorted(
            (index for index, ids in enumerate(sources) if ids),
            key=lambda index: len(sources[index]),
            reverse=True,
        )
        found: list[list[Hypothesis]] = [[] for _ in sources]
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            source, padding = self._padded([sources[index] for index in batch])
            results = beam_search(self.model, source, padding, self.config.search, n_best)
            for index, hypotheses in zip(batch, results, strict=True):
                found[index] = hypotheses
        return found

    def text(self, hypothesis: Hypothesis) -> str:
        """The hypothesis as one line of text."""
        tokens = [token for token in hypothesis.tokens if token != EOS]
        return self.tokenizer.decode(tokens).replace("\n", " ")

    def _cut(self, ids: list[int], line: int) -> list[int]:
        """`ids` without EOS, shortened to max_length tokens with it."""
        longest = self.config.training.max_length
        if self.config.model.positions == "learned":
            longest = min(longest, self.config.model.max_positions)
        if len(ids) < longest:
            return ids
        self.warn(
            f"line {line} has {len(ids) + 1} tokens, the model takes {longest}: its end is cut"
        )
        return ids[: longest - 1]

    def _padded(self, sources: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
        lengths = np.array([len(ids) + 1 for ids in sources])
        tokens = np.full((len(sources), lengths.max()), PAD, dtype=np.int64)
        for row, ids in zip(tokens, sources, strict=True):
            row[: len(ids)] = ids
            row[len(ids)] = EOS
        padding = np.arange(tokens.shape[1]) >= lengths[:, None]
        device = self.model.embedding.weight.device
        source = torch.from_numpy(tokens).to(device)
        return source, torch.from_numpy(padding).to(device) if padding.any() else None


def read_chunks(file: BinaryIO, size: int) -> Iterator[list[bytes]]:
    """The lines of a binary file without their ``\\n``, `size` at a time."""
    while chunk := list(islice(file, size)):
        yield [line.removesuffix(b"\n") for line in chunk]


def _decoded(line: bytes, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        _to_stderr(f"line {number} is not UTF-8; what can't be read is replaced")
        return line.decode("utf-8", errors="replace")


def translate_file(
    translator: Translator,
    source: BinaryIO,
    target: BinaryIO,
    batch_size: int = 64,
    n_best: int = 1,
    buffer_lines: int = 2048,
) -> int:
    """Translates `source` into `target`, `buffer_lines` at a time; returns the number of lines.

    With n_best > 1 a line of output is "line number ||| text ||| score", as Moses writes it.
    """
    number = 0
    for chunk in read_chunks(source, buffer_lines):
        lines = [_decoded(line, number + i) for i, line in enumerate(chunk, start=1)]
        found = translator.search(lines, batch_size, n_best, first_line=number + 1)
        for index, hypotheses in enumerate(found):
            if n_best == 1:
                text = [translator.text(hypotheses[0]) if hypotheses else ""]
            else:
                text = [
                    f"{number + index} ||| {translator.text(h)} ||| {h.score:.4f}"
                    for h in hypotheses
                ]
            target.writelines(line.encode("utf-8") + b"\n" for line in text)
        target.flush()
        number += len(chunk)
    return number


def parser() -> argparse.ArgumentParser:
    arguments = ArgumentParser(prog="translate", description=__doc__.partition("\n\n")[0])
    arguments.add_argument("--run", required=True, help="folder that train wrote")
    arguments.add_argument("--checkpoint", help="a file of it; default: averaged.pt, else newest")
    arguments.add_argument("--input", help="file to read; default stdin")
    arguments.add_argument("--output", help="file to write; default stdout")
    arguments.add_argument("--beam", type=int, help="default: the config's, 4 in the paper")
    arguments.add_argument("--alpha", type=float, help="default: the config's, 0.6 in the paper")
    arguments.add_argument(
        "--length-penalty", choices=("gnmt", "average"), help="((5+|Y|)/6)^alpha or |Y|^alpha"
    )
    arguments.add_argument("--n-best", type=int, default=1)
    arguments.add_argument("--batch-size", type=int, default=64, help="sentences at a time")
    arguments.add_argument(
        "--buffer-lines", type=int, help="lines read before the first comes out; 1 on a terminal"
    )
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 with one sentence on stderr."""
    options = parser().parse_args(arguments)
    try:
        for name in ("batch_size", "n_best", "buffer_lines"):
            if getattr(options, name) is not None and getattr(options, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        translator = Translator.load(options.run, options.checkpoint, options.device)
        translator.config = _with_search(translator.config, options)
        with ExitStack() as files:
            source, target = sys.stdin.buffer, sys.stdout.buffer
            if options.input:
                source = files.enter_context(open(options.input, "rb"))
            if options.output:
                target = files.enter_context(open(options.output, "wb"))
            buffer = options.buffer_lines or (1 if source.isatty() else 2048)
            translate_file(translator, source, target, options.batch_size, options.n_best, buffer)
    except BrokenPipeError:
        return 0
    except (CheckpointError, ValueError, OSError) as error:
        _to_stderr(str(error))
        return 2
    return 0


def _with_search(config: Config, options: argparse.Namespace) -> Config:
    given = {
        name: getattr(options, name)
        for name in ("beam", "alpha", "length_penalty")
        if getattr(options, name) is not None
    }
    search: SearchConfig = dataclasses.replace(config.search, **given)
    if options.n_best > search.beam:
        raise ValueError(f"--n-best {options.n_best} is more than --beam {search.beam}")
    return dataclasses.replace(config, search=search)


if __name__ == "__main__":
    sys.exit(main())
