"""Autocast as torch's own ops have it, applied where the public functions start."""

from __future__ import annotations

import torch
from torch import Tensor


def is_enabled(device_type: str) -> bool:
    """Whether autocast is on for a device; torch raises when asked of "meta"."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def cast_to_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Floating tensors (float64 excepted) in the autocast dtype of their device, if it is on.

    The rule of torch's "lower precision" list, in which its attention and linear stand.
    """
    first = tensors[0]
    device_type = first.device.type if isinstance(first, Tensor) else "cpu"
    if not is_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if _is_eligible(x) else x for x in tensors)


def _is_eligible(x: Tensor | None) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
