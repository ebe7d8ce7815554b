"""Builds of the native module beside the one in use, and runs of the ops' tests on them."""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
X86 = platform.machine() in ("x86_64", "AMD64")
LEVELS = ("generic", "sse42", "avx2", "avx512", "avx512bf16") if X86 else ("generic",)


def build(name: str, levels: tuple[str, ...], **env: str) -> Path:
    """The folder, under build/, with fastattn/_C of these levels; ninja reuses what is there."""
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(folder)]
    env = {**os.environ, "FASTATTN_BUILD_ISA": ",".join(levels), **env}
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes build here too
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def run_ops(
    isa: str, *options: str, one_in: int = 1, folder: Path | None = None, **env: str
) -> None:
    """The ops' tests on the cpu backend at a level; skips where this CPU hasn't got it."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.native.cpu_only",
        "-p",
        "no:cacheprovider",
    ]
    command += ["tests/ops", "-m", "not slow and not gpu", f"--one-in={one_in}", *options]
    if folder is not None:
        command.append(f"--native-folder={folder}")
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "FASTATTN_CPU_ISA": isa, **env},
        capture_output=True,
        text=True,
    )
    if "is not supported by this CPU" in done.stderr:
        pytest.skip(f"this CPU hasn't got {isa}")
    output = done.stdout[-8000:] + done.stderr[-8000:]
    assert done.returncode == 0 and f"instruction set {isa} " in done.stdout, output
