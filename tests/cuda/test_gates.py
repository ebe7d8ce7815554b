"""The kernels' static gates, and the tools that read machine code."""

from __future__ import annotations

import pytest

from fastattn._cuda import Kernel
from tools.gates.banks import CASES, conflicts
from tools.gates.gates import GATES
from tools.gates.machine_code import parse
from tools.gates.mix import TileLoop
from tools.gates.occupancy import blocks_per_multiprocessor
from tools.gates.table import HEAD, Gate, Measured, faults, line, measure


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: f"{gate.label}, sm_{gate.arch}")
def test_gate(gate):
    found = measure(gate)
    print(HEAD, line(gate, found), sep="\n")
    assert not faults(gate, found)


@pytest.mark.parametrize("case", CASES)
def test_no_bank_of_shared_memory_is_met_twice(case):
    found = list(conflicts(case))
    assert sum(wavefronts for _, wavefronts, _ in found) > 10_000
    assert all(wavefronts == needed for _, wavefronts, needed in found), found


# Two products of 64 multiply-adds: one in a loop of 2 passes inside a loop of pieces, one unrolled;
# a way round them for tiles without keys, and a longer way for masked tiles.
LISTING = """
        /*0008*/                   MOV R1, c[0x0][0x20] ;
.L_x_1:
        /*0010*/              @!P0 BRA `(.L_x_7) ;
        /*0018*/         {         LDG.E.128 R2, [R4] ;
        /*0020*/                   IADD R4, R4, 0x10 }
        /*0028*/               @P1 BRA `(.L_x_3) ;
.L_x_2:
        /*0030*/                   BAR.SYNC 0x0 ;
.L_x_4:
        /*0038*/                   LDS.U.128 R8, [R6] ;
{math}
        /*0040*/               @P2 BRA `(.L_x_4) ;
        /*0048*/               @P3 BRA `(.L_x_2) ;
        /*0050*/                   BRA `(.L_x_5) ;
.L_x_3:
        /*0058*/                   LDG.E R2, [R4] ;
        /*0060*/                   LDG.E R3, [R4] ;
        /*0068*/                   BRA `(.L_x_2) ;
.L_x_5:
{math}{math}
        /*0070*/                   SSY `(.L_x_6) ;
        /*0078*/                   SYNC                    (*"BRANCH_TARGETS .L_x_6"*) ;
.L_x_6:
        /*0080*/                   MUFU.EX2 R3, R3 ;
.L_x_7:
        /*0088*/               @P4 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_8:
        /*0098*/                   BRA `(.L_x_8);
"""
FFMA = "        /*00a0*/                   FFMA R9, R2.reuse, R8, R9 ;\n"


def listing() -> TileLoop:
    return TileLoop(parse(LISTING.replace("{math}", 32 * FFMA)), "FFMA", product=64, pieces=3)


def test_a_pass_is_read_from_machine_code():
    one = listing().one_pass()
    assert dict(one.counts) == {
        "BRA": 2 + 3 * (2 + 1) + 1 + 1, "LDG": 1, "IADD": 1, "BAR": 3, "LDS": 3 * 2,
        "FFMA": 3 * 64 + 64, "SSY": 1, "SYNC": 1, "MUFU": 1,
    }  # fmt: skip
    assert dict(one.math_counts) == {"LDS": 6, "FFMA": 192, "BRA": 6}
    assert one.math_share("FFMA") == 192 / 204
    assert (one.paired, one.narrow_loads) == (1, 0)


def test_code_without_a_tile_loop_is_an_error():
    with pytest.raises(ValueError, match="no loop with HMMA"):
        TileLoop(parse(LISTING.replace("{math}", FFMA)), "HMMA", 64, 1)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "expected"),
    [
        (60, 128, 128, 32 << 10, (2, "shared")),
        (60, 128, 255, 16 << 10, (2, "registers")),
        (60, 128, 168, 0, (3, "registers")),
        (60, 1024, 32, 0, (2, "registers")),
        (60, 32, 16, 0, (32, "blocks")),
        (60, 256, 16, 0, (8, "warps")),
        (60, 128, 32, 49 << 10, (0, "shared")),
        (70, 128, 32, 48 << 10, (2, "shared")),
        (75, 128, 64, 0, (8, "registers")),
        (75, 128, 32, 32 << 10, (2, "shared")),
        (80, 256, 64, 40 << 10, (4, "registers")),
    ],
)
def test_blocks_of_a_multiprocessor(arch, threads, registers, shared, expected):
    assert blocks_per_multiprocessor(arch, threads, registers, shared) == expected


def test_what_a_kernel_fails_is_said():
    gate = Gate("a kernel", Kernel("x", "k", 128), 60, "FFMA", registers=128, blocks=2, share=0.8)
    good = Measured(128, 0, 0, 32 << 10, 2, "shared", share=0.81)
    assert faults(gate, good) == []
    bad = Measured(130, 8, 16, 50 << 10, 1, "registers", share=0.5)
    assert faults(gate, bad) == [
        "registers 130 > 128", "spills 8 > 0", "shared 51200 > 49152", "blocks 1 < 2",
        "share 0.5 < 0.8", "stack 16 bytes",
    ]  # fmt: skip
    assert "FAILS: registers 130 > 128; spills" in line(gate, bad)


def test_loops_that_are_not_those_described_are_an_error():
    gate = next(gate for gate in GATES if gate.kind)
    with pytest.raises(ValueError, match=f"{gate.product * 99} *$|99 products of"):
        measure(gate._replace(products=99))
