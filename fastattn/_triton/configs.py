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


class AttentionConfig(NamedTuple):
    """``block_dk``, ``block_dv``: the head dimensions padded to what a product takes."""

    block_dk: int
    block_dv: int
    config: Config


# (rows that a block owns, rows that it walks along at a time, warps, stages) for half precision by
# the wider padded head dimension; "small" is every NVIDIA GPU with less than 100 KB of shared
# memory a block.
_HALF = {
    "forward": {
        "sm_80": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
        "sm_90": {64: (128, 128, 8, 3), 128: (128, 128, 8, 2), 256: (128, 64, 8, 2)},
        "sm_100": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (128, 64, 8, 2)},
        "small": {64: (128, 64, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 1)},
        "amd": {64: (128, 64, 4, 1), 128: (128, 64, 4, 1), 256: (64, 32, 8, 1)},
    },
    "dq": {
        "sm_80": {64: (64, 64, 8, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 1)},
        "sm_90": {64: (64, 128, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 1)},
        "small": {64: (64, 64, 8, 2), 128: (64, 32, 8, 1), 256: (32, 32, 8, 1)},
        "amd": {64: (64, 64, 4, 1), 128: (64, 32, 4, 1), 256: (32, 32, 8, 1)},
    },
    "dkdv": {
        "sm_80": {64: (64, 32, 4, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 1)},
        "sm_90": {64: (128, 64, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 1)},
        "small": {64: (64, 32, 4, 2), 128: (64, 32, 8, 1), 256: (32, 32, 8, 1)},
        "amd": {64: (64, 64, 4, 1), 128: (64, 32, 4, 1), 256: (32, 32, 8, 1)},
    },
}
# Float32, whose products take three passes and twice the registers.
_FLOAT32 = {
    "forward": {64: (64, 32, 8, 2), 128: (32, 32, 8, 1), 256: (16, 16, 4, 1)},
    "dq": {64: (32, 32, 8, 1), 128: (32, 16, 8, 1), 256: (16, 16, 8, 1)},
    "dkdv": {64: (32, 32, 8, 1), 128: (32, 16, 8, 1), 256: (16, 16, 8, 1)},
}
_PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}


def attention(
    kernel: str,
    head_dim: int,
    value_dim: int,
    itemsize: int,
    arch: str,
    *,
    is_heavy: bool,
    q_len: int,
) -> AttentionConfig:
    """Of ``kernel``: "forward" or "dq", whose blocks own queries, or "dkdv", whose own keys.

    ``is_heavy``: a mask is read or dropout drawn for every score, whose addresses and words want
    registers of their own.
    """
    blocks = power_of_2(head_dim, 16), power_of_2(value_dim, 16)
    if arch == INTERPRETER:
        return AttentionConfig(*blocks, Config(32, 32, 4, 1))
    widest = max(64, *blocks)
    table = _FLOAT32[kernel] if itemsize == 4 else _tiles(kernel, arch)
    owned, walked, warps, stages = table[widest]
    if is_heavy:
        owned, walked = min(64, owned), min(32 if itemsize == 2 else 16, walked)
        if kernel == "dkdv" and arch.startswith("sm_"):  # 64 rows make a product of Hopper's
            owned, walked, warps = (64, 16, 8) if _family(arch) == "sm_90" else (32, 32, 8)
    if kernel == "forward" and q_len <= 16:
        owned, warps = 16, 4
    block_m, block_n = (walked, owned) if kernel == "dkdv" else (owned, walked)
    return AttentionConfig(*blocks, Config(block_m, block_n, warps, stages))


def _tiles(kernel: str, arch: str) -> dict[int, tuple[int, int, int, int]]:
    return _HALF[kernel].get(arch) or _HALF[kernel][_family(arch)]


def _family(arch: str) -> str:
    if not arch.startswith("sm_"):
        return "amd"
    return {"sm_80": "sm_80", "sm_90": "sm_90", "sm_100": "sm_90", "sm_103": "sm_90"}.get(
        arch, "small"
    )


def attention_splits(blocks: int, q_len: int, kv_len: int, block_n: int, arch: str) -> int:
    """Parts that the keys are cut into where ``blocks`` alone would leave processors idle."""
    tiles = -(-kv_len // block_n)
    if arch == INTERPRETER:
        return 4 if q_len <= 16 and tiles >= 4 else 1
    processors = _PROCESSORS.get(arch, 64)
    splits = 1
    while blocks and 2 * splits * blocks <= processors and tiles >= 4 * splits and splits < 32:
        splits *= 2
    return splits


def classes(count: int, arch: str) -> Config:
    """For kernels whose block walks along one row of ``count`` logits."""
    block = min(power_of_2(count, 16), 256 if arch == INTERPRETER else 4096)
    return Config(1, block, min(8, max(1, block // 256)))
