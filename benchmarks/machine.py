"""Where and with what a result was measured."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

import fastattn
from fastattn import _native


@dataclass
class Machine:
    date: str
    commit: str
    cpu: str
    cores: int
    threads: int
    isa: str
    python: str
    torch: str
    fastattn: str
    load_average: float


def describe() -> Machine:
    return Machine(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        commit=_commit(),
        cpu=_cpu_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        isa=_native.isa() if _native.available() else "none",
        python=platform.python_version(),
        torch=torch.__version__,
        fastattn=fastattn.__version__,
        load_average=os.getloadavg()[0],
    )


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    root = Path(__file__).parent
    found = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    return found.stdout.strip() or "unknown"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
