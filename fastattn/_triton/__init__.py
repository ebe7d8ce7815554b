"""What the hosts of Triton kernels share: whether they can run here, and how they are launched.

triton itself is imported by the kernels' own files alone (``*_kernels.py``, ``philox.py``), which
hosts import on their first launch: importing fastattn costs nothing and needs no triton.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fastattn._triton.configs import Config

INTERPRETER = "interpreter"
DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
_OLDEST = (8, 0)
_interprets = os.environ.get("TRITON_INTERPRET") == "1"


def why_not(name: str, x: Tensor, *others: Tensor | None) -> str | None:
    """One sentence why no Triton kernel can take ``x`` (called ``name``), or None if one can.

    ``others`` are tensors whose dtype has to be one of the kernels' as well; masks are not.
    """
    if not _is_installed():
        return "triton is not installed: pip install triton"
    if not (x.is_cuda or _interprets):
        return f"{name} is on {x.device}, the triton backend needs it on a GPU"
    for tensor in (x, *others):
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"{tensor.dtype}: the triton backend takes float32, float16 and bfloat16"
    if x.is_cuda and not _is_served(x.device.index or 0):
        return f"{name} is on a GPU before compute capability 8.0, which triton does not serve"
    if x.numel() >= 2**31 and x.numel() // max(1, x.shape[-1]) >= 2**31:
        return f"{name} has 2^31 rows or more"
    return None


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _is_served(device: int) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= _OLDEST


def arch(x: Tensor) -> str:
    """The name by which the table of configurations knows the device: "sm_90", "gfx942", ..."""
    return _arch_of(x.device.index or 0) if x.is_cuda else INTERPRETER


@functools.cache
def _arch_of(device: int) -> str:
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def launch(kernel: Any, programs: int, config: Config, *args: Any, **constants: Any) -> None:
    """Run ``kernel`` on ``programs`` blocks, on the device and current stream of its first tensor.

    The grid has one dimension, for the others end at 65535. ``config`` gives warps and stages.
    """
    if programs == 0:
        return
    device = args[0].device
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kernel[(programs,)](
            *args,
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )


def as_bytes(mask: Tensor) -> Tensor:
    """A bool tensor as uint8 in the same memory; others as they are."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def as_rows(x: Tensor) -> Tensor:
    """[..., N] as [rows, N], copied only where strides leave no other way; a scalar is one row."""
    if x.dim() == 0:
        return x.reshape(1, 1)
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def last_dropped(p: float) -> int:
    """The largest Philox word that dropout drops, floor(p 2^32) - 1, as a signed 32-bit integer.

    -1 (the word of all ones) for p = 1. There must be one: see ``drops``.
    """
    word = int(p * 2**32) - 1
    return word - 2**32 if word >= 2**31 else word


def drops(p: float) -> bool:
    """Whether any Philox word is dropped at all."""
    return int(p * 2**32) > 0


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
