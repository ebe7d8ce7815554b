"""Checkpoints that are whole or absent, and the folder that holds a run's last ones.

RUN/checkpoints/step-00001500.pt is written at every checkpoint_steps and at the end,
RUN/checkpoints/interrupted.pt where a signal stopped the run; it goes at the next checkpoint.
"""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch

_NAME = re.compile(r"step-(\d+)\.pt")


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written or read, in one sentence."""


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Writes `state` (tensors, numbers, text, lists, dicts): `path` is old or new, never half.

    Raises CheckpointError where the disk refuses; what stood at `path` stays.
    """
    path = Path(path)
    aside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        aside.unlink(missing_ok=True)
        raise CheckpointError(f"can't write {path}: {error}") from None


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads what `save_checkpoint` wrote, to the CPU; runs no code stored in the file.

    Raises CheckpointError where the file is missing, truncated or no checkpoint.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"{path} is damaged or no checkpoint ({reason})") from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CheckpointFolder:
    """A run's checkpoints, by step."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.interrupted = self.folder / "interrupted.pt"

    def steps(self) -> list[tuple[int, Path]]:
        """(step, file) of every regular checkpoint, oldest first."""
        found = []
        for file in self.folder.glob("step-*.pt"):
            match = _NAME.fullmatch(file.name)
            if match:
                found.append((int(match[1]), file))
        return sorted(found)

    def has(self, step: int) -> bool:
        """Whether a regular checkpoint of `step` stands there."""
        return any(step == found for found, _ in self.steps())

    def newest(self) -> Path | None:
        """The file to resume from: the interrupted one where there is one, else the last step."""
        if self.interrupted.is_file():
            return self.interrupted
        regular = self.steps()
        return regular[-1][1] if regular else None

    def save(self, step: int, state: dict[str, Any], keep: int) -> Path:
        """Writes a regular checkpoint, then removes all but the last `keep`."""
        path = self.folder / f"step-{step:08d}.pt"
        save_checkpoint(path, state)
        self.interrupted.unlink(missing_ok=True)
        for _, old in self.steps()[:-keep]:
            old.unlink()
        return path
