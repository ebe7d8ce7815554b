"""Compiling before the first call: for cards that need not be here, or for a GPU at hand."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from fastattn._cuda import catalog, cubins, driver
from fastattn._cuda.kernel import Kernel


class Outcome(NamedTuple):
    """What became of one kernel: ``seconds`` is None where it was there already."""

    kernel: Kernel
    arch: int
    seconds: float | None


def compile_sets(
    archs: Iterable[int], ops: Iterable[str] | None = None, jobs: int = 1
) -> Iterator[Outcome]:
    """Compile the default sets for ``archs`` (60 for sm_60) into the cache, ``jobs`` at a time.

    Raises:
        CompileError: a kernel can't be compiled.
        ValueError: an op has no CUDA kernels.
    """
    work = [(kernel, arch) for arch in archs for kernel in catalog.kernels(arch, ops)]
    if jobs == 1:
        yield from map(_compile, work)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_compile, work)


def _compile(work: tuple[Kernel, int]) -> Outcome:
    kernel, arch = work
    if cubins.is_kept(kernel, arch):
        return Outcome(kernel, arch, None)
    began = time.perf_counter()
    cubins.get(kernel, arch)
    return Outcome(kernel, arch, time.perf_counter() - began)


def load_sets(indices: Iterable[int], ops: Iterable[str] | None = None) -> int:
    """Compile and load the default sets for CUDA devices; how many kernels that are."""
    count = 0
    for index in indices:
        for kernel in catalog.kernels(driver.capability(index), ops):
            driver.load(index, kernel)
            count += 1
    return count
