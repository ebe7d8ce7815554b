"""``fastattn.warmup``: the CUDA kernels compiled and loaded before the first call."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def warmup(device: torch.device | str | int | None = None, ops: Iterable[str] | None = None) -> int:
    """Compile and load the CUDA kernels that usual calls need, so that no later call has to.

    Kernels are otherwise compiled by the first call that needs them, some tenths of a second each,
    and kept on disk. A CUDA graph can only be captured of kernels that are loaded.

    Args:
        device: a CUDA device; None is every one that torch sees.
        ops: names of ops, such as "attention" and "dropout"; None is all that have CUDA kernels.

    Returns:
        How many kernels are ready.

    Raises:
        RuntimeError: there is no usable GPU, or a kernel can't be compiled or loaded.
        ValueError: ``device`` is no CUDA device, or an op has no CUDA kernels.
    """
    from fastattn._cuda import ahead, driver

    if device is None:
        indices = range(torch.cuda.device_count())
        if not indices:
            raise RuntimeError("warmup: torch sees no CUDA device")
    else:
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if chosen.type != "cuda":
            raise ValueError(f"warmup: device is {chosen}; accepted are CUDA devices")
        first = torch.cuda.current_device() if chosen.index is None else chosen.index
        indices = range(first, first + 1)
    for index in indices:
        if reason := driver.why_not_on(index):
            raise RuntimeError(f"warmup: {reason}")
    return ahead.load_sets(indices, ops)
