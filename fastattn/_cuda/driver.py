"""Launches on NVIDIA GPUs, through the driver part of fastattn._C."""

from __future__ import annotations

import functools
import threading

from fastattn import _native
from fastattn._cuda import cubins, nvrtc
from fastattn._cuda.kernel import Kernel

_lock = threading.Lock()
_loaded: dict[tuple[Kernel, int], int] = {}
_by_function: dict[tuple[str, str, int], int] = {}


@functools.cache
def why_not() -> str | None:
    """One sentence why no kernel can run on any GPU here, or None if one can."""
    reason = _native.why_not_available()
    return reason if reason is not None else _native.lib().driver_why_not() or None


@functools.cache
def why_not_on(index: int) -> str | None:
    """One sentence why kernels can't run on CUDA device ``index``, or None if they can."""
    reason = why_not()
    if reason is not None:
        return reason
    try:
        library, _ = nvrtc.choose(_native.lib().driver_capability(index))
        library.headers()
    except RuntimeError as error:
        return str(error)
    return None


def launch(
    index: int, stream: int, kernel: Kernel, grid: tuple[int, int, int], params: bytes
) -> None:
    """Start ``kernel`` on CUDA device ``index`` and ``stream`` (its cudaStream_t).

    Raises:
        RuntimeError: it can't be compiled, loaded or started, or would have to be compiled while a
            CUDA graph is being captured.
    """
    number = _loaded.get((kernel, index))
    if number is None:
        number = load(index, kernel, stream)
    _native.lib().driver_launch(number, index, grid, kernel.threads, kernel.shared, stream, params)


def load(index: int, kernel: Kernel, stream: int | None = None) -> int:
    """Have ``kernel`` compiled and loaded for CUDA device ``index``; its number for the driver.

    Raises:
        RuntimeError: that fails, or a CUDA graph is being captured on ``stream``.
    """
    lib = _native.lib()
    capability = lib.driver_capability(index)
    key = (kernel.source, kernel.name, capability)
    with _lock:
        number = _by_function.get(key)
        if number is None:
            if stream is not None and lib.driver_is_capturing(index, stream):
                raise RuntimeError(
                    f"{kernel.name} is not compiled and loaded yet, which can't happen while a "
                    "CUDA graph is captured: call fastattn.warmup() or run once before"
                )
            compiled = cubins.get(kernel, capability)
            number = lib.driver_load(compiled.cubin, compiled.function, kernel.name)
            _by_function[key] = number
        _loaded[kernel, index] = number
        return number


def version() -> str:
    """The newest CUDA the driver serves, say "12.9"."""
    number = _native.lib().driver_version()
    return f"{number // 1000}.{number % 1000 // 10}"


def capability(index: int) -> int:
    """The compute capability of CUDA device ``index``, 60 for 6.0."""
    return _native.lib().driver_capability(index)
