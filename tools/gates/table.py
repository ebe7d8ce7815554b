"""One line of the table: a kernel on an architecture, measured, and held to its limits."""

from __future__ import annotations

import re
from typing import NamedTuple

from fastattn._cuda import Kernel, nvrtc
from tools.gates.machine_code import disassemble
from tools.gates.mix import TileLoop
from tools.gates.occupancy import blocks_per_multiprocessor


class Gate(NamedTuple):
    """A kernel and what is required of it.

    label: how the table calls it, say "attention forward, fp32, D=64, causal".
    arch: 60 for sm_60.
    kind: its multiply-adds, "FFMA" or "HMMA"; "" where only registers and the like are asked about.
    product: multiply-adds that a thread (FFMA) or warp (HMMA) executes in one innermost loop.
    pieces: how often a loop around such a loop runs.
    products: products per pass of the tile loop, by which the reading of the loops is checked.
    registers, spills, shared: at most; spills in bytes, of stores and loads together.
    blocks: at least, on a multiprocessor.
    share, math_share: of multiply-adds among all instructions, at least: of a whole pass of the
        tile loop, and of its innermost loops alone.
    """

    label: str
    kernel: Kernel
    arch: int
    kind: str = ""
    product: int = 0
    pieces: int = 1
    products: int = 0
    registers: int = 255
    spills: int = 0
    shared: int = 48 << 10
    blocks: int = 1
    share: float = 0.0
    math_share: float = 0.0


class Measured(NamedTuple):
    """What a kernel turned out to be; ``share`` and what follows are 0 without a tile loop."""

    registers: int
    spills: int
    stack: int
    shared: int
    blocks: int
    limit: str
    share: float = 0.0
    math_share: float = 0.0
    instructions: int = 0
    multiplies: int = 0
    narrow_loads: int = 0


def measure(gate: Gate) -> Measured:
    """Compile the gate's kernel and read it.

    Raises:
        CompileError: it does not compile.
        ValueError: its loops are not those the gate describes.
    """
    library, arch = nvrtc.choose(gate.arch)
    kernel = gate.kernel
    compiled = library.compile(kernel.source, kernel.name, arch, "--ptxas-options=-v")
    registers = _number(r"Used (\d+) registers", compiled.log)
    static = _number(r"(\d+) bytes smem", compiled.log)
    blocks, limit = blocks_per_multiprocessor(
        gate.arch, kernel.threads, registers, kernel.shared + static
    )
    found = Measured(
        registers=registers,
        spills=_number(r"(\d+) bytes spill stores", compiled.log)
        + _number(r"(\d+) bytes spill loads", compiled.log),
        stack=_number(r"(\d+) bytes stack frame", compiled.log),
        shared=kernel.shared + static,
        blocks=blocks,
        limit=limit,
    )
    return _with_mix(gate, found, compiled.cubin) if gate.kind else found


def _with_mix(gate: Gate, found: Measured, cubin: bytes) -> Measured:
    loop = TileLoop(disassemble(cubin), gate.kind, gate.product, gate.pieces)
    one = loop.one_pass()
    multiplies, expected = one.counts[gate.kind], gate.product * gate.products
    if not expected <= multiplies <= 1.15 * expected:
        raise ValueError(
            f"{gate.label}: a pass of the tile loop has {multiplies} {gate.kind}, "
            f"{gate.products} products of {gate.product} have {expected}"
        )
    return found._replace(
        share=round(one.share(gate.kind), 3),  # as printed
        math_share=round(one.math_share(gate.kind), 3),
        instructions=one.counts.total(),
        multiplies=multiplies,
        narrow_loads=one.narrow_loads,
    )


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    return int(found[1]) if found else 0


def faults(gate: Gate, found: Measured) -> list[str]:
    """What the kernel fails, each as "registers 130 > 128"; empty if it passes."""
    at_most = [(n, getattr(found, n), getattr(gate, n)) for n in ("registers", "spills", "shared")]
    at_least = [(n, getattr(found, n), getattr(gate, n)) for n in ("blocks", "share", "math_share")]
    return [
        *(f"{name} {value} > {limit}" for name, value, limit in at_most if value > limit),
        *(f"{name} {value:.3g} < {limit:.3g}" for name, value, limit in at_least if value < limit),
        *([f"stack {found.stack} bytes"] if found.stack and not gate.spills else []),
    ]


HEAD = (
    f"{'kernel':<52} {'arch':<6} {'regs':>4} {'spill':>5} {'shared':>6} {'blocks/SM':>9} "
    f"{'instr':>6} {'FMA share':>9} {'in loops':>8}  required"
)


def line(gate: Gate, found: Measured) -> str:
    """The gate's line of the table, under ``HEAD``."""
    blocks = f"{found.blocks} {found.limit[:4]}"
    mix = f"{found.instructions:>6} {found.share:>9.1%} {found.math_share:>8.1%}"
    if not gate.kind:
        mix = f"{'':>6} {'':>9} {'':>8}"
    required = f"<= {gate.registers} regs, {gate.spills} B, >= {gate.blocks} blocks"
    if gate.share:
        required += f", >= {gate.share:.0%}"
    if gate.math_share:
        required += f" ({gate.math_share:.0%})"
    verdict = "; ".join(faults(gate, found))
    return (
        f"{gate.label:<52} sm_{gate.arch:<3} {found.registers:>4} {found.spills:>5} "
        f"{found.shared:>6} {blocks:>9} {mix}  {required}"
        + (f"  FAILS: {verdict}" if verdict else "")
    )
