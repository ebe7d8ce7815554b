"""How every Triton kernel is cut into tiles: pure functions of op, shape, dtype and architecture.

No run-time autotuning: a first call never searches, and the same call always runs the same code.
Under Triton's interpreter tiles are small, so that tests' small shapes meet every edge of them.
"""

from __future__ import annotations

from typing import NamedTuple

INTERPRETER = "interpreter"


class Config(NamedTuple):
    """A tile and the hardware that works on it; ``block_m`` rows, ``block_n`` columns."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 2


class RowConfig(NamedTuple):
    """``is_whole``: a row fits one tile, else the kernel walks along it."""

    is_whole: bool
    config: Config


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << max(0, n - 1).bit_length())


def rows(columns: int, arch: str, most: int = 16384) -> RowConfig:
    """For kernels whose block owns whole rows of ``columns`` elements; ``most`` fit in registers.

    About 8 to 32 elements a thread; narrow rows share a block.
    """
    interprets = arch == INTERPRETER
    most = 512 if interprets else most
    block_n = power_of_2(columns, 16)
    is_whole = block_n <= most
    if not is_whole:
        block_n = 256 if interprets else 4096
    block_m = min(256, 32768 // block_n) if interprets else max(1, 1024 // block_n)
    warps = min(16, max(1, block_m * block_n // 256))
    return RowConfig(is_whole, Config(block_m, block_n, warps))


def columns(arch: str) -> Config:
    """For kernels whose block owns some columns and walks down the rows."""
    return Config(32, 64, 4) if arch == INTERPRETER else Config(16, 128, 4)
