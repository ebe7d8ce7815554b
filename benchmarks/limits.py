"""What this machine can do at best, measured in the same process as the benchmarks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from benchmarks.harness import set_malloc, threads


@functools.cache
def matmul_flops(dtype: torch.dtype = torch.float32) -> float:
    """torch.mm of 1024 x 1024, one thread: flop/s."""
    a, b, out = (torch.randn(1024, 1024).to(dtype) for _ in range(3))
    with threads(1):
        return 2 * 1024**3 / _best(lambda: torch.mm(a, b, out=out))


@functools.cache
def copy_bandwidth() -> float:
    """torch copy of 256 MB, one thread: bytes read and written a second."""
    set_malloc("reused")
    a, b = (torch.zeros(64 * 2**20) for _ in range(2))
    with threads(1):
        return 2 * a.nbytes / _best(lambda: b.copy_(a))


@functools.cache
def read_bandwidth() -> float:
    """Sum of 256 MB, one thread: bytes read a second."""
    a = torch.zeros(64 * 2**20)
    with threads(1):
        return a.nbytes / _best(lambda: a.sum())


def _best(function: Callable[[], object], rounds: int = 8) -> float:
    function()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)
