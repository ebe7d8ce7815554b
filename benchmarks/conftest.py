"""The ``race`` fixture, which compares ours with a peer, and the table and file it ends in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from benchmarks import limits, machine
from benchmarks.harness import compare
from benchmarks.report import markdown_table, one_line

RESULTS = Path(__file__).parent / "results"
ROWS = pytest.StashKey[list[dict]]()
QUIETNESS = pytest.StashKey[machine.Quietness]()

Run = Callable[[], object]
Wrap = Callable[[Callable], Callable]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastattn benchmarks")
    group.addoption(
        "--long",
        action="store_true",
        help="also the cases marked slow, fresh buffers, compiled peers and huge pages",
    )
    group.addoption("--seconds", type=float, help="a case is timed so long (by default, its own)")
    group.addoption(
        "--results",
        type=Path,
        help="the JSON file for the results; by default, and only of a whole run that passes, one "
        "named by the machine in benchmarks/results",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "reused_buffers: malloc keeps all that is freed, from here on; so these run last"
    )
    config.stash[ROWS] = []
    config.stash[QUIETNESS] = machine.Quietness()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.extra_keyword_matches.add("cpu")
    if not config.getoption("--long"):
        items[:] = [item for item in items if item.get_closest_marker("slow") is None]
    items.sort(key=lambda item: item.get_closest_marker("reused_buffers") is not None)


@dataclass
class Race:
    """Compares two functions, checks that they agree first, and keeps a row of the table."""

    benchmark: object
    request: pytest.FixtureRequest

    def __call__(
        self,
        name: str,
        ours: Run,
        peer: Callable[[Wrap], Run],
        *,
        peer_name: str,
        reach: float | None,
        limit: limits.Limit,
        check: Callable[[], None] | None = None,
        seconds: float = 3.0,
        **extra: object,
    ) -> None:
        """
        Args:
            peer: makes the peer's function; its argument is to be put around torch's, and is
                torch.compile or nothing.
            reach: the ratio to reach, where there is one.
            limit: one thread's time by what bounds ours.
            check: raises where the two disagree; None where the caller has checked that.
            seconds: of measuring.

        malloc does the usual, or keeps all that is freed where the test is marked reused_buffers.
        """
        if check is not None:
            check()
        option = self.request.config.getoption
        seconds = option("--seconds") or seconds
        reuses = self.request.node.get_closest_marker("reused_buffers") is not None
        malloc = "reused" if reuses else "usual"
        variants = [(malloc, peer_name, peer(lambda f: f))]
        if option("--long"):
            torch._dynamo.reset()
            variants += [
                ("fresh", peer_name, variants[0][2]),
                (malloc, f"{peer_name}, compiled", peer(torch.compile)),
            ]
        for buffers, against, run in variants:
            found = compare(ours, run, seconds=seconds, buffers=buffers)
            self._keep(
                {
                    "name": name,
                    "peer": against,
                    "buffers": buffers,
                    "ours_ms": found.ours.cpu_seconds * 1e3,
                    "peer_ms": found.peer.cpu_seconds * 1e3,
                    "ratio": found.cpu_ratio,
                    "ours_wall_ms": found.ours.wall_seconds * 1e3,
                    "peer_wall_ms": found.peer.wall_seconds * 1e3,
                    "wall_ratio": found.wall_ratio,
                    "reach": reach,
                    "rounds": found.ours.rounds,
                    "ours_page_faults": found.ours.page_faults,
                    "peer_page_faults": found.peer.page_faults,
                    **_of_limit(limit, found.ours.cpu_seconds, found.ours.page_faults),
                    **extra,
                }
            )
        self.benchmark.group = name.split(":")[0]
        self.benchmark.pedantic(ours, rounds=1)

    def _keep(self, row: dict) -> None:
        config = self.request.config
        config.stash[ROWS].append(row)
        self.benchmark.extra_info.setdefault("rows", []).append(row)
        reporter = config.pluginmanager.getplugin("terminalreporter")
        seconds = config.stash[QUIETNESS].so_far()["minutes"] * 60
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            reporter.write_line(f"\n{seconds:4.0f} s  {one_line(row)}")


def _of_limit(limit: limits.Limit, seconds: float, page_faults: float) -> dict:
    """What bounds the kernel, by share; page faults that it suffers belong to it."""
    parts = dict(limit)
    if page_faults > 100:
        parts["page faults"] = page_faults * limits.page_fault_seconds()
    total = sum(parts.values())
    return {
        "limit": {part: round(took / total, 3) for part, took in parts.items()},
        "limit_fraction": total / seconds,
    }


@pytest.fixture
def race(benchmark, request: pytest.FixtureRequest) -> Race:
    return Race(benchmark, request)


def pytest_terminal_summary(terminalreporter, exitstatus: int, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    about = machine.describe()
    run = config.stash[QUIETNESS].so_far()
    terminalreporter.write_sep("=", "ours beside the peers")
    terminalreporter.write_line(markdown_table(rows))
    if run["busy"]:
        terminalreporter.write_line(
            f"\nTHE MACHINE WAS BUSY: others used {run['cores_used_by_others']} cores meanwhile"
        )
    path = config.getoption("--results")
    whole = exitstatus == 0 and _is_whole(config)
    if path is None and whole:
        long = "-long" if config.getoption("--long") else ""
        path = RESULTS / f"{machine.slug(about)}{long}.json"
    if path is not None:
        result = {"machine": asdict(about), "run": run, "rows": rows}
        path.write_text(json.dumps(result, indent=1) + "\n")
        terminalreporter.write_line(f"\nresults written to {path}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _is_whole(config: pytest.Config) -> bool:
    """Whether the run has every case at its full length."""
    folders = [Path(config.invocation_params.dir, argument).resolve() for argument in config.args]
    chosen = config.getoption("-k") or config.getoption("-m") or config.getoption("--seconds")
    return folders == [RESULTS.parent] and not chosen
