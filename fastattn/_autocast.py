"""Autocast as torch's own ops have it, applied where the public functions start."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor


def is_enabled(device_type: str) -> bool:
    """Whether autocast is on for a device; torch raises when asked of "meta"."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def cast_to_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Floating tensors (float64 excepted) in the autocast dtype of their device, if it is on.

    The rule of torch's "lower precision" list, in which its attention and linear stand.
    """
    device_type = _device_type(tensors[0])
    if not is_enabled(device_type):
        return tensors
    return _cast(tensors, torch.get_autocast_dtype(device_type))


def cast_to_float32(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Floating tensors (float64 excepted) in float32 where autocast is on, but on the CPU as given.

    The rule of torch's "float32" list, in which its layer_norm and softmax stand on GPUs alone.
    """
    device_type = _device_type(tensors[0])
    if device_type == "cpu" or not is_enabled(device_type):
        return tensors
    return _cast(tensors, torch.float32)


def cast_mask_to_autocast(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A floating mask that fits the query, float32 kept: finfo.min would become -inf in half.

    ``query`` has been cast already.
    """
    if not isinstance(mask, Tensor) or not is_enabled(_device_type(query)):
        return mask
    fits = mask.dtype in (query.dtype, torch.float32)
    return mask if fits or not _is_eligible(mask) else mask.float()


def _device_type(x: object) -> str:
    return x.device.type if isinstance(x, Tensor) else "cpu"


def _cast(tensors: tuple[Tensor | None, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(x.to(dtype) if _is_eligible(x) else x for x in tensors)


def _is_eligible(x: Tensor | None) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
