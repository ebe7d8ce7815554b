"""Fair timing of two functions in one process.

pytest-benchmark times one function at a time, and a machine drifts between two of them. Here ours
and the peer alternate, the first of one round last in the next, and every figure is a median:

- 1 thread: CPU time of the process, the steadiest figure on a shared machine;
- all threads: wall time of the rounds in which the process was not preempted.

Memory: with ``buffers="usual"`` malloc does what it does in any program: glibc keeps freed blocks
of up to 32 MB and gives larger ones back, which then cost page faults again. ``"reused"`` lets it
keep all that is freed, so that neither side pays them; ``"fresh"`` gives every block above 64 kB
back, so that both do. Page faults are counted.
"""

from __future__ import annotations

import ctypes
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_KEEP_ALL = 2**31 - 1
# M_MMAP_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD. The thresholds grow as blocks are freed: "usual"
# is what they have grown to once one of 32 MB was, glibc's DEFAULT_MMAP_THRESHOLD_MAX.
_MALLOC = {
    "usual": (2**16, 32 << 20, 64 << 20),
    "reused": (0, 64 << 10, _KEEP_ALL),
    "fresh": (2**16, 64 << 10, 64 << 10),
}
_SLOW = 2.0  # seconds; of rounds longer than that few have to do


@dataclass
class Timing:
    """Medians of one function: seconds and page faults a call; how many calls on one thread."""

    cpu_seconds: float
    wall_seconds: float
    page_faults: float
    rounds: int


@dataclass
class Comparison:
    """Both sides of a case; ``ratio`` > 1 means ours is faster."""

    ours: Timing
    peer: Timing

    @property
    def cpu_ratio(self) -> float:
        return self.peer.cpu_seconds / self.ours.cpu_seconds

    @property
    def wall_ratio(self) -> float:
        return self.peer.wall_seconds / self.ours.wall_seconds


def set_malloc(buffers: str) -> None:
    """What glibc does with freed blocks: "usual", "reused" or "fresh" (see above).

    What "reused" has kept serves later calls too, so "usual" is measured before it in a process.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    parameters = (_M_MMAP_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)
    for parameter, value in zip(parameters, _MALLOC[buffers], strict=True):
        libc.mallopt(parameter, value)


@contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare(
    ours: Callable[[], object],
    peer: Callable[[], object],
    *,
    seconds: float,
    buffers: str = "usual",
) -> Comparison:
    """Time both, alternating: for ``seconds`` in all, and at least for a few rounds.

    Three fifths of the time go to 1 thread, the rest to all of torch's threads.
    """
    set_malloc(buffers)
    functions = {"ours": ours, "peer": peer}
    start = time.perf_counter()
    for function in functions.values():
        function()
    slow = time.perf_counter() - start > _SLOW
    if not slow:
        _alternate(functions, 0.05 * seconds, 2)
    with threads(1):
        single = _alternate(functions, 0.6 * seconds, 2 if slow else 7)
    multi = _alternate(functions, 0.4 * seconds, 2 if slow else 7)
    timings = {
        name: Timing(
            cpu_seconds=statistics.median(s.cpu for s in single[name]),
            wall_seconds=statistics.median(_undisturbed(multi[name])),
            page_faults=statistics.median(s.faults for s in single[name]),
            rounds=len(single[name]),
        )
        for name in functions
    }
    return Comparison(**timings)


@dataclass
class _Sample:
    cpu: float
    wall: float
    faults: int
    preempted: bool


def _alternate(
    functions: dict[str, Callable[[], object]], seconds: float, least: int
) -> dict[str, list[_Sample]]:
    names = list(functions)
    samples: dict[str, list[_Sample]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    while len(samples[names[0]]) < least or time.perf_counter() < end:
        for name in names:
            samples[name].append(_sample(functions[name]))
        names.reverse()
        if len(samples[names[0]]) >= 2000:
            break
    return samples


def _sample(function: Callable[[], object]) -> _Sample:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_SELF)
    return _Sample(cpu, wall, after.ru_minflt - usage.ru_minflt, after.ru_nivcsw > usage.ru_nivcsw)


def _undisturbed(samples: list[_Sample]) -> list[float]:
    """Wall times of rounds without preemption; the fastest quarter where those are too few."""
    calm = [s.wall for s in samples if not s.preempted]
    least = max(3, len(samples) // 4)
    return calm if len(calm) >= least else sorted(s.wall for s in samples)[:least]


def peak_extra_bytes(function: Callable[[], object]) -> int:
    """How far the resident set grows while ``function`` runs, which has run before."""
    set_malloc("fresh")
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # resets the peak
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) * 1024


def assert_agree(name: str, ours: torch.Tensor, peer: torch.Tensor) -> None:
    """A wrong result is not worth timing; the tests hold the tight bounds."""
    half = ours.dtype in (torch.float16, torch.bfloat16)
    rtol, atol = (2e-2, 2e-2) if half else (1e-3, 1e-4)
    torch.testing.assert_close(ours, peer, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")


def assert_all_agree(
    names: Sequence[str], ours: Sequence[torch.Tensor], peer: Sequence[torch.Tensor]
) -> None:
    for name, a, b in zip(names, ours, peer, strict=True):
        assert_agree(name, a, b)
