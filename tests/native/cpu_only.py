"""A pytest plugin: of the ops' tests only those on the cpu backend, and of each test one in N.

python -m pytest -p tests.native.cpu_only tests/ops --one-in 4 --native-folder build/sanitized
"""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

import fastattn
from fastattn import _native


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, help="of each test's cases, one in so many")
    parser.addoption("--native-folder", help="where the build of fastattn/_C to be tested is")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--native-folder") is not None:
        folder = Path(config.getoption("--native-folder"), "fastattn").resolve()
        fastattn.__path__.insert(0, str(folder))
        assert Path(_native.lib().__file__).parent == folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"instruction set {_native.isa()} of {_native.lib().__file__}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    one_in, seen = config.getoption("--one-in"), collections.Counter()
    kept = []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if params.get("backend") != "cpu":
            continue
        test = item.nodeid.split("[")[0]
        if seen[test] % one_in == 0:
            kept.append(item)
        seen[test] += 1
    items[:] = kept
