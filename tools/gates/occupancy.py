"""How many blocks of a kernel share a multiprocessor (NVIDIA's occupancy calculator)."""

from __future__ import annotations

from typing import NamedTuple


class Multiprocessor(NamedTuple):
    """What a multiprocessor has, and in which portions it is given away."""

    shared: int  # bytes
    shared_per_block: int  # bytes at most
    shared_reserved: int  # bytes per block for the system
    warps: int
    blocks: int
    registers: int = 65536
    schedulers: int = 4
    fma_per_cycle: int = 64


# CUDA C++ Programming Guide, "Technical specifications per compute capability".
MULTIPROCESSORS = {
    60: Multiprocessor(64 << 10, 48 << 10, 0, 64, 32, schedulers=2),
    61: Multiprocessor(96 << 10, 48 << 10, 0, 64, 32, fma_per_cycle=128),
    70: Multiprocessor(96 << 10, 96 << 10, 0, 64, 32),
    75: Multiprocessor(64 << 10, 64 << 10, 0, 32, 16),
    80: Multiprocessor(164 << 10, 163 << 10, 1024, 64, 32),
}
_REGISTERS_PORTION = 256  # registers of a warp come in portions
_SHARED_PORTION = {60: 256, 61: 256, 70: 256, 75: 256, 80: 128}


def blocks_per_multiprocessor(
    arch: int, threads: int, registers: int, shared: int
) -> tuple[int, str]:
    """(blocks at a time, what limits them: "registers", "shared", "warps" or "blocks")."""
    sm = MULTIPROCESSORS[arch]
    if shared > sm.shared_per_block:
        return 0, "shared"
    warps = threads // 32
    per_warp = _round_up(32 * max(registers, 1), _REGISTERS_PORTION)
    # Each scheduler has its share of the registers, and takes every so many-th warp.
    warps_by_registers = sm.registers // sm.schedulers // per_warp * sm.schedulers
    used = _round_up(shared + sm.shared_reserved, _SHARED_PORTION[arch])
    limits = {
        "blocks": sm.blocks,
        "registers": warps_by_registers // warps,
        "shared": sm.shared // used if used else sm.blocks,
        "warps": sm.warps // warps,
    }
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def _round_up(number: int, portion: int) -> int:
    return -(-number // portion) * portion
