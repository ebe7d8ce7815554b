"""Runs the kernels of csrc/*.cuh: on an NVIDIA GPU, or for tests on emulated threads of the CPU.

A kernel is one instantiation of a template. The same kernel, grid and parameters go to either, so
an op writes its host code once.
"""

from __future__ import annotations

import torch

from fastattn._cuda import driver, emulator
from fastattn._cuda.catalog import register_kernels
from fastattn._cuda.kernel import Kernel
from fastattn._cuda.params import DROPOUT, Params, dropout_fields

__all__ = [
    "DROPOUT",
    "Kernel",
    "Params",
    "dropout_fields",
    "emulator",
    "launch",
    "register_kernels",
    "why_not_on",
]


def launch(device: torch.device, kernel: Kernel, grid: tuple[int, int, int], params: bytes) -> None:
    """Start ``kernel`` on torch's current stream of ``device``, or run it on emulated threads.

    Args:
        device: of the tensors; the CPU means the emulator, which returns when the kernel is done.
        grid: the number of blocks in x, y and z.
        params: the kernel's one argument, by ``Params.pack``. The tensors have to live until the
            call returns; torch's allocator keeps their memory for the stream after that.

    Raises:
        RuntimeError: the kernel can't be compiled or started, or the emulator found a fault.
        ValueError: a size beyond CUDA's limits.
    """
    kernel.check(grid)
    if device.type == "cpu":
        emulator.launch(kernel, grid, params)
    else:
        index = torch.cuda.current_device() if device.index is None else device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        driver.launch(index, stream, kernel, grid, params)


def why_not_on(device: torch.device) -> str | None:
    """One sentence why the ``cuda`` backend can't serve tensors on ``device``, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the tensors are on {device}, the cuda backend needs them on an NVIDIA GPU"
    return driver.why_not_on(torch.cuda.current_device() if device.index is None else device.index)
