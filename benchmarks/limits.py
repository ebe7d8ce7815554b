"""What this machine can do at best, measured in the same process as the benchmarks.

A kernel's limit is the time its unavoidable work would take at these rates, on one thread: a dict
from the rate's name to seconds. The parts add up, for they compete for the same units.
"""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable

import torch

from benchmarks.harness import threads

Limit = dict[str, float]
MATMULS = ((512, 40), (1024, 12), (2048, 3))  # size, rounds


def matmul(flops: float, dtype: torch.dtype = torch.float32) -> Limit:
    return {"matmul": flops / matmul_flops(dtype)}


def exps(count: float) -> Limit:
    """Each at least eight vector instructions in the place of multiply-adds: range reduction, a
    polynomial of degree five, scaling."""
    return {"exp": count * 8 * 2 / matmul_flops()}


def moved(nbytes: float, working_set: int) -> Limit:
    """Bytes read and written, in a kernel whose tensors take ``working_set`` bytes in all."""
    return {"bandwidth": nbytes / copy_bandwidth(_power_of_two(working_set))}


def read(nbytes: float, working_set: int) -> Limit:
    return {"read bandwidth": nbytes / read_bandwidth(_power_of_two(working_set))}


@functools.cache
def matmul_flops(dtype: torch.dtype = torch.float32) -> float:
    """torch.mm of square matrices, the best of three sizes: flop/s."""
    return max(_matmul_flops(size, dtype, rounds) for size, rounds in MATMULS)


def _matmul_flops(size: int, dtype: torch.dtype, rounds: int) -> float:
    a, b, out = (torch.randn(size, size).to(dtype) for _ in range(3))
    return 2 * size**3 / _best(lambda: torch.mm(a, b, out=out), rounds)


@functools.cache
def copy_bandwidth(working_set: int) -> float:
    """torch's copy between two halves of ``working_set`` bytes: bytes read and written a second."""
    a, b = (torch.zeros(working_set // 8) for _ in range(2))
    repeats = max(1, 2**26 // working_set)
    return repeats * 2 * a.nbytes / _best(lambda: [b.copy_(a) for _ in range(repeats)])


@functools.cache
def read_bandwidth(working_set: int) -> float:
    """torch's sum of ``working_set`` bytes: bytes read a second."""
    a = torch.zeros(working_set // 4)
    repeats = max(1, 2**26 // working_set)
    return repeats * a.nbytes / _best(lambda: [a.sum() for _ in range(repeats)])


@functools.cache
def page_fault_seconds() -> float:
    """The first write to a page of 4 KiB: seconds each."""
    size = 2**26

    def touch() -> None:
        with mmap.mmap(-1, size) as fresh:
            fresh.madvise(mmap.MADV_NOHUGEPAGE)
            torch.frombuffer(fresh, dtype=torch.uint8).zero_()

    return _best(touch) / (size // mmap.PAGESIZE)


def _power_of_two(nbytes: int) -> int:
    """Sizes are few, so that the machine is measured few times; at most 256 MiB, past any cache."""
    return min(2**28, 2 ** max(16, (nbytes - 1).bit_length()))


def _best(function: Callable[[], object], rounds: int = 15) -> float:
    with threads(1):
        function()
        times = []
        for _ in range(rounds):
            start = time.process_time()
            function()
            times.append(time.process_time() - start)
    return min(times)
