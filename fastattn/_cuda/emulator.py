"""Kernels on emulated CUDA threads: each instantiation is a small library, built on first use.

Environment, read at each launch: FASTATTN_EMULATOR_ARCH picks the architecture whose path runs
(600, 610, 700, 750 or 800; default 600). FASTATTN_EMULATOR_ORDER is the order of threads and
blocks: forward (the default), reverse, or a number that seeds a shuffle.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from fastattn._cuda import sources
from fastattn._cuda.kernel import Kernel
from fastattn._cuda.params import Params
from fastattn._cuda.toolchain import Toolchain, compile_to, locked, toolchain, why_not

__all__ = [
    "BankUse",
    "EmulatorError",
    "counting_banks",
    "launch",
    "launches",
    "prebuild",
    "why_not",
    "why_not_on",
]

ARCHITECTURES = (600, 610, 700, 750, 800)
_one_at_a_time = threading.Lock()
_launches: Counter[str] = Counter()
_bank_counts: dict[str, list[BankUse]] | None = None


class EmulatorError(RuntimeError):
    """A fault of a kernel that the emulator found; the message names thread and source line."""


def architecture() -> int:
    """The emulated architecture, as __CUDA_ARCH__ spells it."""
    given = os.environ.get("FASTATTN_EMULATOR_ARCH", "600")
    if given not in map(str, ARCHITECTURES):
        known = ", ".join(map(str, ARCHITECTURES))
        raise ValueError(f"FASTATTN_EMULATOR_ARCH is {given!r}; accepted are {known}")
    return int(given)


def thread_order() -> int:
    """0 forward, 1 reverse, else a seed."""
    given = os.environ.get("FASTATTN_EMULATOR_ORDER", "forward")
    if given in ("forward", "reverse"):
        return int(given == "reverse")
    if given.isdecimal() and 1 < int(given) < 2**64:
        return int(given)
    raise ValueError(
        f"FASTATTN_EMULATOR_ORDER is {given!r}; accepted are forward, reverse and a number above 1"
    )


def launches() -> Counter[str]:
    """How often each kernel has been launched in this process, by its C++ name."""
    return _launches


def launch(kernel: Kernel, grid: tuple[int, int, int], params: bytes) -> None:
    """Run ``kernel`` to its end.

    Raises:
        EmulatorError: the kernel is faulty.
        RuntimeError: it doesn't compile, or the emulator can't be built here.
    """
    tools, arch = _tools(), architecture()
    run, size = _load(tools, kernel.source, kernel.name, arch)
    if size != len(params):
        raise EmulatorError(f"{kernel.name}: {len(params)} bytes of params, the struct has {size}")
    with _one_at_a_time:
        _launches[kernel.name] += 1
        fault = _core(tools).fastattn_emulator_launch(
            run, params, (ctypes.c_uint * 3)(*grid), kernel.threads, kernel.shared,
            thread_order(), _bank_counts is not None,
        )  # fmt: skip
        if fault is None and _bank_counts is not None:
            _note_banks(tools, kernel.name, _bank_counts)
    if fault is not None:
        raise EmulatorError(f"{kernel.name}: {fault.decode()}")


class BankUse(NamedTuple):
    """What one line of a kernel's source did to the banks of shared memory.

    accesses: by warps. wavefronts: the passes over the banks they took. needed: those without a
    conflict, 1 for accesses of 2 or 4 bytes a thread, 2 for 8 and 4 for 16.
    """

    place: str  # "file:line"
    kind: str  # "load" or "store"
    size: int  # bytes a thread
    accesses: int
    wavefronts: int
    needed: int


@contextmanager
def counting_banks() -> Iterator[dict[str, list[BankUse]]]:
    """Counts, for the launches in a ``with`` block, accesses by load_shared and store_shared.

    Yields:
        A dict that gets, by the kernel's C++ name, a ``BankUse`` for each line of its source.
    """
    global _bank_counts
    found: dict[str, list[BankUse]] = {}
    _bank_counts = found
    try:
        yield found
    finally:
        _bank_counts = None


def _note_banks(tools: Toolchain, name: str, counts: dict[str, list[BankUse]]) -> None:
    sums = {use[:3]: use for use in counts.get(name, ())}
    for text in _core(tools).fastattn_emulator_bank_report().decode().splitlines():
        place, kind, *numbers = text.split()
        size, accesses, wavefronts, needed = map(int, numbers)
        before = sums.get((place, kind, size), BankUse(place, kind, size, 0, 0, 0))
        sums[place, kind, size] = before._replace(
            accesses=before.accesses + accesses,
            wavefronts=before.wavefronts + wavefronts,
            needed=before.needed + needed,
        )
    counts[name] = list(sums.values())


def prebuild(kernels: Iterable[Kernel], jobs: int | None = None) -> None:
    """Compile ``kernels`` that aren't yet, ``jobs`` at a time (all processors if None)."""
    tools, arch = _tools(), architecture()
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        list(pool.map(lambda k: _build(tools, k.source, k.name, arch), dict.fromkeys(kernels)))


def layout(params: Params) -> dict[str, int]:
    """The offsets of a params struct's members as C++ has them, and under "" its size."""
    members = ", ".join(f"offsetof(Struct, {name})" for name in params.members)
    text = (
        f'#define FA_ARCH 0\n#include "{params.source}"\n#include <cstddef>\n'
        f"using Struct = {params.struct_name};\n"
        f'extern "C" __attribute__((visibility("default"))) const size_t layout[] = '
        f"{{{members}, sizeof(Struct)}};\n"
    )
    library = ctypes.CDLL(str(_compiled(_tools(), params.source, text)))
    names = [*params.members, ""]
    return dict(zip(names, (ctypes.c_size_t * len(names)).in_dll(library, "layout"), strict=True))


def _tools() -> Toolchain:
    return toolchain(os.environ.get("FASTATTN_EMULATOR_SANITIZE", ""))


@functools.cache
def _core(tools: Toolchain) -> ctypes.CDLL:
    core = ctypes.CDLL(str(tools.core), mode=ctypes.RTLD_GLOBAL)
    launch = core.fastattn_emulator_launch
    launch.restype = ctypes.c_char_p
    launch.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_uint,
        ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int,
    ]  # fmt: skip
    core.fastattn_emulator_bank_report.restype = ctypes.c_char_p
    return core


@functools.cache
def _load(tools: Toolchain, source: str, name: str, arch: int) -> tuple[int, int]:
    """(address of the function that runs one thread, bytes of its params)."""
    _core(tools)
    library = ctypes.CDLL(str(_build(tools, source, name, arch)))
    size = library.fastattn_kernel_params_size
    size.restype = ctypes.c_size_t
    address = ctypes.cast(library.fastattn_kernel, ctypes.c_void_p).value
    assert address is not None
    return address, size()


def _build(tools: Toolchain, source: str, name: str, arch: int) -> Path:
    text = f'#define FA_ARCH {arch}\n#include "{source}"\nFASTATTN_EMULATOR_KERNEL({name})\n'
    return _compiled(tools, source, text)


def _compiled(tools: Toolchain, source: str, text: str) -> Path:
    """The library made of ``text``, which includes ``source``; compiled unless it is there."""
    key = hashlib.sha256(f"{sources.digest(source)}\0{text}".encode()).hexdigest()[:24]
    target = tools.folder / f"{key}.so"
    if target.exists():
        return target
    with locked(target):
        if not target.exists():
            unit = tools.folder / f"{key}.cpp"
            unit.write_text(text, encoding="utf-8")
            compile_to(tools, target, ["-include", str(tools.prelude), "-shared", str(unit)])
    return target


def why_not_on(device: torch.device) -> str | None:
    """One sentence why the emulator can't serve tensors on ``device``, or None if it can."""
    if device.type != "cpu":
        return f"the tensors are on {device}, the emulator needs them on the CPU"
    return why_not()
