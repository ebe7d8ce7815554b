"""Where and from what a result comes: commit, machine, versions."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

import fastattn

_ROOT = Path(__file__).resolve().parents[2]


def commit() -> str | None:
    """The checked-out commit, with "-dirty" where tracked files differ; None outside of git."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")


def describe_machine() -> dict:
    """Processor, GPU, thread count and versions."""
    return {
        "processor": _processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastattn": fastattn.__version__,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
