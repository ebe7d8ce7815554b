"""What the hosts of kernels over rows share: csrc/common/rows.cuh's types and sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn._cuda.kernel import Kernel

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
TYPE_NUMBERS = {dtype: number for number, dtype in enumerate(TYPES)}
MAX_COLUMNS = 2**30  # kernels count columns in 32 bits
MAX_BLOCKS = 65536  # each walks over what is left
_OF_WARP, _OF_BLOCK = 1024, 4096  # columns that a warp, or a block of 256, holds in registers


def usual_types(arch: int) -> list[str]:
    """The types that usual calls need on sm_``arch``: bfloat16 from sm_80 on."""
    return [name for name in TYPES.values() if arch >= 80 or name != "__nv_bfloat16"]


def team(columns: int) -> tuple[int, bool]:
    """How many threads share a row, and whether it is longer than what they hold."""
    return (32 if columns <= _OF_WARP else 256), columns > _OF_BLOCK


def team_kernel(source: str, name: str, types: tuple[str, ...], size: int, walks: bool) -> Kernel:
    """The kernel ``name`` for teams of ``size`` threads."""
    arguments = ", ".join((*types, str(size), str(walks).lower()))
    threads, shared = (128, 0) if size == 32 else (size, size // 32 * 4)
    return Kernel(source, f"fa::{name}<{arguments}>", threads, shared)


def blocks(rows: int, size: int, most: int = MAX_BLOCKS) -> int:
    """How many blocks of teams of ``size`` threads to start for ``rows``."""
    return min(-(-rows // (4 if size == 32 else 1)), most)


def as_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[..., N] as [rows, N] in ``dtype``, its columns side by side in memory.

    It is a copy only where strides or dtype leave no other way.
    """
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    rows = rows if dtype is None else rows.to(dtype)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def type_of(x: Tensor | None) -> int:
    """The number of ``x``'s type, for kernels that are told it when they run."""
    return 0 if x is None else TYPE_NUMBERS[x.dtype]


def unsupported(name: str, x: Tensor, *others: Tensor | None) -> str | None:
    """One sentence why no kernel over rows can take ``x``, called ``name``, or None.

    ``others`` are tensors whose dtype has to be one of the kernels' as well.
    """
    for tensor in (x, *others):
        if tensor is not None and tensor.dtype not in TYPES:
            return f"{tensor.dtype}: the kernels take float32, float16 and bfloat16"
    if x.dim() and x.shape[-1] > MAX_COLUMNS:
        return f"{name} has rows of {x.shape[-1]}, the kernels take up to {MAX_COLUMNS}"
    return None
