"""Trains the Transformer on a prepared corpus (paper section 5).

    python -m examples.translation.train --data DIR --run RUN --config tiny
        [--max-minutes M] [--max-steps N] [--set key=value ...]

RUN keeps config.toml, spm.model, checkpoints/, log.jsonl, tensorboard/, and at the end averaged.pt
and training.json. The same command on a RUN that was interrupted goes on where it stopped, and on
the CPU ends with the same bits as if it never had.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from examples.translation.average import average_run
from examples.translation.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    load_checkpoint,
    save_checkpoint,
)
from examples.translation.cli import ArgumentParser
from examples.translation.config import Config, ConfigError, load_config
from examples.translation.data import PreparedCorpus
from examples.translation.engine import Engine, TrainingError, Update, validation_loss
from examples.translation.model import Transformer
from examples.translation.progress import Progress


class Run:
    """A folder in which an `Engine` trains, resumed from its newest checkpoint.

    Raises TrainingError or CheckpointError where the folder holds another or a damaged run.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Config,
        corpus: PreparedCorpus,
        device: str | torch.device = "cpu",
    ):
        self.folder = Path(folder)
        self.engine = Engine(config, corpus, device)
        self.validation_ids = corpus.split("val")
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints")
        self.elapsed = 0.0  # seconds of training, those before a resume included
        self.stop_requested = False
        newest = self.checkpoints.newest()
        if newest is not None:
            self._resume(newest, corpus)
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(corpus.path / "spm.model", self.folder / "spm.model")
        (self.folder / "config.toml").write_text(self.engine.config.to_toml(), "utf-8")

    def _resume(self, newest: Path, corpus: PreparedCorpus) -> None:
        state = load_checkpoint(newest)
        tokenizer = self.folder / "spm.model"
        if tokenizer.read_bytes() != (corpus.path / "spm.model").read_bytes():
            raise TrainingError(
                f"{self.folder}: the run was started with another subword model than the one in "
                f"{corpus.path}; give another --run"
            )
        try:
            self.engine.restore(state)
        except TrainingError as error:
            raise TrainingError(f"{self.folder}: {error}; give another --run") from None
        self.elapsed = state["elapsed"]

    def train(self, max_minutes: float = math.inf, bar: bool = True) -> bool:
        """Trains until max_steps, `max_minutes` of training in all, or `stop_requested`.

        Returns whether it finished; then RUN/averaged.pt and RUN/training.json are written.
        Raises TrainingError where the loss is no longer finite; the checkpoints stay.
        """
        engine, training = self.engine, self.engine.config.training
        progress = Progress(self.folder, engine.step, training.max_steps, bar)
        start = time.monotonic() - self.elapsed
        seen: list[Update] = []
        logged = self.elapsed
        try:
            while engine.step < training.max_steps and self.elapsed < max_minutes * 60:
                seen.append(self._update())
                self.elapsed = time.monotonic() - start
                progress.advance()
                if engine.step % training.log_steps == 0:
                    self._log(progress, seen, self.elapsed - logged, max_minutes)
                    seen, logged = [], self.elapsed
                if engine.step % training.validate_steps == 0:
                    self._log_validation(progress)
                if engine.step % training.checkpoint_steps == 0:
                    self.checkpoints.save(engine.step, self._state(), training.keep_checkpoints)
                if self.stop_requested:
                    self._save_interrupted(progress)
                    return False
            self._finish(progress)
            return True
        finally:
            progress.close()

    def _update(self) -> Update:
        try:
            return self.engine.update(next(self.engine.stream))
        except TrainingError as error:
            kept = self.checkpoints.newest()
            where = f"the last good checkpoint is {kept}" if kept else "no checkpoint was due yet"
            raise TrainingError(f"{error}; stopped, {where}") from None

    def _state(self) -> dict[str, Any]:
        return {**self.engine.state(), "elapsed": self.elapsed}

    def _log(
        self, progress: Progress, seen: list[Update], seconds: float, max_minutes: float
    ) -> None:
        step, max_steps = self.engine.step, self.engine.config.training.max_steps
        tokens = sum(update.tokens for update in seen)
        loss, nll = (sum(u[i] * u.tokens for u in seen) / tokens for i in (0, 1))
        rate = self.engine.optimizer.param_groups[0]["lr"]
        values = {
            "loss": loss,
            "nll": nll,
            "ppl": math.exp(min(nll, 80)),
            "rate": rate,
            "grad_norm": seen[-1].grad_norm,
            "tokens_per_second": tokens / seconds,
            "tokens_per_update": tokens / len(seen),
            "epochs": self.engine.stream.epochs,
            "elapsed": self.elapsed,
        }
        progress.record("train", step, values)
        by_steps = (max_steps - step) * seconds / len(seen)
        left = min(by_steps, max_minutes * 60 - self.elapsed)
        progress.show(loss, tokens / seconds, rate, max(left, 0))

    def _log_validation(self, progress: Progress) -> None:
        nll = validation_loss(self.engine.model, self.validation_ids, self.engine.config)
        values = {"nll": nll, "ppl": math.exp(min(nll, 80)), "elapsed": self.elapsed}
        progress.record("validation", self.engine.step, values)
        progress.say(f"step {self.engine.step}: validation perplexity {values['ppl']:.2f}")

    def _save_interrupted(self, progress: Progress) -> None:
        step = self.engine.step
        if not self.checkpoints.has(step):
            save_checkpoint(self.checkpoints.interrupted, self._state())
        progress.say(f"step {step}: stopped and saved; the same command goes on from here")

    def _finish(self, progress: Progress) -> None:
        """Last checkpoint, average of the last ones, and what the run came to."""
        engine, config = self.engine, self.engine.config
        if not self.checkpoints.has(engine.step):
            self.checkpoints.save(engine.step, self._state(), config.training.keep_checkpoints)
        averaged = average_run(self.folder, config.training.keep_checkpoints)
        model = Transformer(config.model).to(engine.device)
        model.load_state_dict(averaged["model"])
        last, average = (
            math.exp(min(validation_loss(m, self.validation_ids, config), 80))
            for m in (engine.model, model)
        )
        summary = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": engine.step,
            "epochs": engine.stream.epochs,
            "train_seconds": self.elapsed,
            "target_tokens": engine.target_tokens,
            "target_tokens_per_second": engine.target_tokens / max(self.elapsed, 1e-9),
            "threads": torch.get_num_threads(),
            "pairs_left_out": engine.batches.skipped,
            "validation_ppl": last,
            "validation_ppl_averaged": average,
            "averaged_steps": averaged["steps"],
        }
        progress.record("end", engine.step, summary)
        (self.folder / "training.json").write_text(json.dumps(summary, indent=2) + "\n", "utf-8")
        progress.say(
            f"step {engine.step}: validation perplexity {last:.2f}, "
            f"{average:.2f} averaged over steps {', '.join(map(str, averaged['steps']))}"
        )


def parser() -> argparse.ArgumentParser:
    arguments = ArgumentParser(prog="train", description=__doc__.partition("\n\n")[0])
    arguments.add_argument("--data", required=True, help="folder that prepare wrote")
    arguments.add_argument("--run", required=True, help="folder of this run; resumed if it exists")
    arguments.add_argument("--config", default="tiny", help="tiny, base, big or a TOML file")
    arguments.add_argument(
        "--max-minutes", type=float, default=math.inf, help="of training, in all parts of the run"
    )
    arguments.add_argument("--max-steps", type=int, help="updates, instead of the config's")
    arguments.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="a config value, as in --set dropout=0.2; may be repeated",
    )
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--no-bar", action="store_true", help="no progress bar")
    return arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 finished, 2 failed, 128 + signal where one stopped it (and it was saved)."""
    options = parser().parse_args(arguments)
    overrides = list(options.overrides)
    if options.max_steps is not None:
        overrides.append(f"training.max_steps={options.max_steps}")
    try:
        if not options.max_minutes > 0:
            raise ConfigError(f"--max-minutes must be positive, not {options.max_minutes:g}")
        config = load_config(options.config, overrides)
        run = Run(options.run, config, PreparedCorpus(options.data), options.device)
        with _stopping(run) as received:
            run.train(options.max_minutes, not options.no_bar)
    except (TrainingError, CheckpointError, ValueError, OSError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    return 128 + received[0] if received else 0


@contextmanager
def _stopping(run: Run) -> Iterator[list[int]]:
    """Lets SIGINT and SIGTERM stop `run` after its update; gives those received."""
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        run.stop_requested = True
        signal.signal(number, signal.SIG_DFL)  # a second one ends at once

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
