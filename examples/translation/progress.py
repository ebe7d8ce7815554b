"""Where a training run can be watched: a bar, RUN/log.jsonl, RUN/tensorboard."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm


class Progress:
    """Writes one JSON line a record, the same numbers for TensorBoard, and the bar.

    Records after `step` are dropped from an older log: the resumed run writes them again.
    """

    def __init__(self, run: Path, step: int, max_steps: int, bar: bool = True):
        self._file = _continued_log(run / "log.jsonl", step)
        self._board = _tensorboard(run / "tensorboard", step)
        self._bar = tqdm(
            total=max_steps,
            initial=step,
            unit="step",
            disable=not bar,
            mininterval=0.5 if sys.stderr.isatty() else 30,
            bar_format="{n_fmt}/{total_fmt} steps |{bar:20}| {elapsed}{postfix}",
        )

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One line of the log: ``kind`` is "train", "validation" or "end"."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def show(self, loss: float, tokens_per_second: float, rate: float, seconds_left: float) -> None:
        """The figures at the end of the bar."""
        minutes, seconds = divmod(round(seconds_left), 60)
        self._bar.set_postfix_str(
            f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s, rate {rate:.2e}, "
            f"{minutes}:{seconds:02d} left",
            refresh=False,
        )

    def advance(self) -> None:
        self._bar.update()

    def say(self, text: str) -> None:
        """A line of text above the bar, on stderr."""
        tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()
        self._file.close()
        if self._board is not None:
            self._board.close()


def _continued_log(path: Path, step: int):
    kept = []
    if path.is_file():
        for line in path.read_bytes().split(b"\n"):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + b"\n")
            except (ValueError, KeyError):  # half a line of a killed run
                continue
    aside = path.with_name(path.name + ".part")
    aside.write_bytes(b"".join(kept))
    os.replace(aside, path)
    return open(path, "a", encoding="utf-8")


def _tensorboard(folder: Path, step: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
