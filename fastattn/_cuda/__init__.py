"""Runs the kernels of csrc/*.cuh: on an NVIDIA GPU, or for tests on emulated threads of the CPU.

A kernel is one instantiation of a template. The same kernel, grid and parameters go to either, so
an op writes its host code once.
"""

from __future__ import annotations

import torch

from fastattn._cuda import emulator
from fastattn._cuda.kernel import Kernel
from fastattn._cuda.params import DROPOUT, Params, dropout_fields

__all__ = ["DROPOUT", "Kernel", "Params", "dropout_fields", "emulator", "launch"]


def launch(device: torch.device, kernel: Kernel, grid: tuple[int, int, int], params: bytes) -> None:
    """Start ``kernel`` with ``grid`` blocks; on the CPU run it to its end on emulated threads.

    Raises:
        RuntimeError: the kernel can't be compiled or started, or the emulator found a fault.
        ValueError: a size beyond CUDA's limits.
    """
    kernel.check(grid)
    if device.type == "cpu":
        emulator.launch(kernel, grid, params)
        return
    raise NotImplementedError(f"kernels on {device}")
