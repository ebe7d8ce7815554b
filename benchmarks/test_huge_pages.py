"""The same cases with torch asking the kernel for huge pages, decided when torch is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks import machine
from benchmarks.conftest import ROWS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_huge_pages(benchmark, request, tmp_path):
    if machine.describe().huge_pages:
        pytest.skip("this whole run has huge pages")
    path = tmp_path / "results.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "benchmarks",
        "--benchmark-only",
        f"--results={path}",
    ]
    if request.config.getoption("--seconds"):
        command.append(f"--seconds={request.config.getoption('--seconds')}")
    env = os.environ | {machine.HUGE_PAGES: "1"}
    run = benchmark.pedantic(
        lambda: subprocess.run(command, env=env, cwd=request.config.rootpath, check=True), rounds=1
    )
    assert run.returncode == 0
    for row in json.loads(path.read_text())["rows"]:
        row["buffers"] += ", huge pages"
        request.config.stash[ROWS].append(row)
