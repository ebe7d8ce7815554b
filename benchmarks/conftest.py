"""The ``race`` fixture, which compares ours with a peer, and the table and file it ends in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from benchmarks import machine
from benchmarks.harness import compare
from benchmarks.report import markdown_table

_ROWS: list[dict] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastattn benchmarks")
    group.addoption("--long", action="store_true", help="also run the cases marked slow")
    group.addoption("--seconds", type=float, default=2.0, help="seconds a case (default 2)")
    group.addoption("--results", type=Path, help="write the rows to this JSON file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        kept = [item for item in items if item.get_closest_marker("slow") is None]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@dataclass
class Race:
    """Compares two functions, checks that they agree first, and keeps a row of the table."""

    benchmark: object
    seconds: float

    def __call__(
        self,
        name: str,
        ours: Callable[[], object],
        peer: Callable[[], object],
        *,
        peer_name: str,
        reach: float,
        check: Callable[[], None] | None = None,
        limit_seconds: float | None = None,
        limit_name: str = "",
        buffers: str = "reused",
        **extra: object,
    ) -> None:
        """``limit_seconds``: one thread's time if only ``limit_name`` bounded the kernel."""
        if check is not None:
            check()
        seconds = self.seconds
        found = compare(ours, peer, seconds=seconds, buffers=buffers)
        row = {
            "name": name,
            "peer": peer_name,
            "ours_ms": found.ours.cpu_seconds * 1e3,
            "peer_ms": found.peer.cpu_seconds * 1e3,
            "ratio": found.cpu_ratio,
            "ours_wall_ms": found.ours.wall_seconds * 1e3,
            "peer_wall_ms": found.peer.wall_seconds * 1e3,
            "wall_ratio": found.wall_ratio,
            "reach": reach,
            "limit": limit_name,
            "limit_fraction": limit_seconds and limit_seconds / found.ours.cpu_seconds,
            "buffers": buffers,
            "ours_page_faults": found.ours.page_faults,
            "peer_page_faults": found.peer.page_faults,
            **extra,
        }
        _ROWS.append(row)
        self.benchmark.extra_info.update(row)
        self.benchmark.group = name.split(":")[0]
        self.benchmark.pedantic(ours, rounds=3, warmup_rounds=1)


@pytest.fixture
def race(benchmark, request: pytest.FixtureRequest) -> Race:
    return Race(benchmark, request.config.getoption("--seconds"))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if not _ROWS:
        return
    terminalreporter.write_sep("=", "ours beside the peers (1 thread CPU time; all threads, wall)")
    terminalreporter.write_line(markdown_table(_ROWS))
    path = config.getoption("--results")
    if path is not None:
        about = asdict(machine.describe())
        path.write_text(json.dumps({"machine": about, "rows": _ROWS}, indent=1) + "\n")
        terminalreporter.write_line(f"results written to {path}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
