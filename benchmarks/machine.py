"""Where and with what a result was measured, and what else the machine did meanwhile."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

import fastattn
from fastattn import _native

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch asks the kernel for huge pages where this is 1
BUSY = 0.2  # cores


@dataclass
class Machine:
    date: str
    commit: str
    cpu: str
    cores: int
    threads: int
    isa: str
    system: str
    python: str
    torch: str
    fastattn: str
    huge_pages: bool


@dataclass
class Quietness:
    """Compares the CPU time of the whole machine with that of this process and its children."""

    load_at_start: float = field(default_factory=lambda: os.getloadavg()[0])
    _start: tuple[float, float, float] = field(default_factory=lambda: _clocks())

    def so_far(self) -> dict[str, object]:
        """Load averages, cores that others kept busy on average, and whether that is too much."""
        wall, everyone, own = (b - a for a, b in zip(self._start, _clocks(), strict=True))
        others = max(0.0, everyone - own) / max(wall, 1e-9)
        return {
            "load_at_start": round(self.load_at_start, 2),
            "load_at_end": round(os.getloadavg()[0], 2),
            "cores_used_by_others": round(others, 2),
            "busy": others > BUSY,
            "minutes": round(wall / 60, 1),
        }


def describe() -> Machine:
    return Machine(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        commit=_commit(),
        cpu=_cpu_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        isa=_native.isa() if _native.available() else "none",
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        fastattn=fastattn.__version__,
        huge_pages=os.environ.get(HUGE_PAGES, "0") == "1",
    )


def slug(machine: Machine) -> str:
    """A file name for this kind of machine, such as cpu-amd-epyc-2-cores-avx512bf16."""
    text = f"cpu {machine.cpu} {machine.cores} cores {machine.isa}".lower()
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def _clocks() -> tuple[float, float, float]:
    """Seconds: wall time, CPU time of everybody, CPU time of this process and its children."""
    own = os.times()
    everyone = 0.0
    stat = Path("/proc/stat")
    if stat.exists():
        user, nice, system, _, _, irq, softirq, steal = map(
            int, stat.read_text().splitlines()[0].split()[1:9]
        )
        everyone = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    mine = own.user + own.system + own.children_user + own.children_system
    return time.monotonic(), everyone, mine


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    root = Path(__file__).parent
    try:
        found = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
