"""Kernels built with AddressSanitizer and UndefinedBehaviorSanitizer run some of the ops' tests.

The first finding ends the process, and its trace is in the output. Leaks are not looked for, since
Python never frees all it has.
"""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from fastattn import _native
from tests.native.builds import LEVELS, build, run_ops

if not _native.available():
    pytest.skip(str(_native.why_not_available()), allow_module_level=True)


def runtime(name: str) -> str | None:
    """The path of a shared library that the compiler brings; None without it."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    found = subprocess.run(
        [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return found if os.path.isabs(found) else None


# The C++ library as well: AddressSanitizer looks for its exceptions when the process starts.
RUNTIMES = {name: runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")}
missing = [name for name, path in RUNTIMES.items() if path is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"the compiler has no {missing}")


def run_sanitized(name: str, levels: tuple[str, ...], isa: str, one_in: int) -> None:
    folder = build(name, levels, FASTATTN_SANITIZE="address,undefined")
    run_ops(
        isa,
        "--ignore=tests/ops/test_registration.py",  # slow, and no kernel is new there
        "--capture=no",  # the trace is written as the process ends
        one_in=one_in,
        folder=folder,
        LD_PRELOAD=" ".join(path for path in RUNTIMES.values() if path),
        ASAN_OPTIONS="detect_leaks=0",
        UBSAN_OPTIONS="print_stacktrace=1",
        OMP_NUM_THREADS="2",
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_best_level():
    run_sanitized("sanitized-best", (_native.isa(),), _native.isa(), one_in=20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("isa", LEVELS)
def test_every_level(isa):
    run_sanitized("sanitized", LEVELS, isa, one_in=5)
