"""Averages the weights of a run's last checkpoints into RUN/averaged.pt (paper section 6.1).

    python -m examples.translation.average --run RUN [--last 5]

A run does so by itself when it finishes; this is for another number of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.translation.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    load_checkpoint,
    save_checkpoint,
)
from examples.translation.cli import ArgumentParser


def average_states(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of the state dicts, summed in fp32 (fp64 for fp64) and stored in their own dtype.

    Tensors that share memory inside a state (tied weights) are averaged once and stay tied;
    those that are not floating point come from the last state.
    Raises ValueError where the states have different names or shapes.
    """
    if not states:
        raise ValueError("nothing to average")
    last = states[-1]
    for state in states:
        if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in last.items()}:
            raise ValueError("the checkpoints hold different models")
    averaged: dict[str, Tensor] = {}
    done: dict[tuple, Tensor] = {}
    for name, tensor in last.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() == 0 or place not in done:
            done[place] = _mean([state[name] for state in states])
        averaged[name] = done[place]
    return averaged


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    last = tensors[-1]
    if not last.is_floating_point():
        return last.clone()
    wide = torch.promote_types(last.dtype, torch.float32)
    total = torch.zeros_like(last, dtype=wide)
    for tensor in tensors:
        total += tensor.to(wide)
    return (total / len(tensors)).to(last.dtype)


def average_run(run: str | Path, last: int) -> dict[str, Any]:
    """Averages the last `last` regular checkpoints of a run into RUN/averaged.pt; returns it.

    Raises CheckpointError where the run has none, or fewer than asked are readable.
    """
    folder = CheckpointFolder(Path(run) / "checkpoints")
    files = folder.steps()[-last:]
    if not files:
        raise CheckpointError(f"{folder.folder} holds no checkpoint to average")
    loaded = [load_checkpoint(file) for _, file in files]
    averaged = {
        "config": loaded[-1]["config"],
        "model": average_states([state["model"] for state in loaded]),
        "steps": [step for step, _ in files],
    }
    save_checkpoint(Path(run) / "averaged.pt", averaged)
    return averaged


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="average", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--run", required=True, help="folder of the run")
    parser.add_argument("--last", type=int, default=5, help="how many (paper: base 5, big 20)")
    options = parser.parse_args(arguments)
    if options.last < 1:
        parser.error(f"--last must be at least 1, not {options.last}")
    try:
        averaged = average_run(options.run, options.last)
    except (CheckpointError, ValueError) as error:
        print(f"average: {error}", file=sys.stderr)
        return 2
    print(f"{options.run}/averaged.pt: mean of steps {', '.join(map(str, averaged['steps']))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
