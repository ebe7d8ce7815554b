"""Kernels written for tests: how they are named and launched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from fastattn._cuda import Kernel, Params, emulator

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
FAULTS = str(FOLDER / "faults.cuh")
FAULT_PARAMS = Params(FAULTS, "FaultParams", out="P", x="P")


def run_fault(name: str, threads: int = 64, shared: int = 1088) -> Tensor:
    """Launch a kernel of faults.cuh on x = 0, 1, .. 63; returns its output, NaN where unwritten."""
    x = torch.arange(64, dtype=torch.float32)
    out = torch.full((64,), float("nan"))
    kernel = Kernel(FAULTS, name, threads, shared)
    emulator.launch(kernel, (1, 1, 1), FAULT_PARAMS.pack(out, x))
    return out


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new process, with this tree's modules and more ``environment``."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def sanitized(code: str) -> subprocess.CompletedProcess[str]:
    """``run_python`` with kernels built under AddressSanitizer and UBSan."""
    libraries = [
        subprocess.run(
            [*os.environ.get("CXX", "c++").split(), f"-print-file-name=lib{name}.so"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for name in ("asan", "ubsan")
    ]  # fmt: skip
    return run_python(
        code,
        LD_PRELOAD=":".join(libraries),
        ASAN_OPTIONS="detect_leaks=0",
        FASTATTN_EMULATOR_SANITIZE="address,undefined",
    )
