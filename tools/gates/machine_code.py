"""Machine code as nvdisasm prints it: instructions, basic blocks, loops."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_LINE = re.compile(
    r"\s+/\*[0-9a-f]{4,}\*/\s+(?P<pair>\{\s*)?(?P<guard>@!?U?P\w+\s+)?"
    r"(?P<op>[A-Z][A-Z0-9_.]*)(?P<rest>.*?)[;}]*\s*$"
)
_TARGET = re.compile(r"\.L_x_\d+")
_JUMPS = {"BRA", "CALL", "CAL", "EXIT", "RET", "SYNC", "BRK", "CONT", "BREAK", "JMP"}
_NEVER_GO_ON = {"BRA", "EXIT", "RET", "SYNC", "BRK", "CONT", "JMP"}


class Instruction(NamedTuple):
    op: str  # with its modifiers: "LDS.U.128"
    guard: str  # "@P0" or ""
    operands: str
    target: str | None  # the label it may jump to
    paired: bool  # issued together with the next

    @property
    def kind(self) -> str:
        return self.op.split(".")[0]


def find_nvdisasm() -> str:
    """An nvdisasm that reads all our architectures; those from CUDA 13.1 on refuse sm_60.

    Raises:
        FileNotFoundError: there is none; says where to get it.
    """
    chosen = os.environ.get("NVDISASM")
    beside_python = Path(sys.executable).with_name("nvdisasm")
    if chosen:
        return chosen
    if beside_python.exists():
        return str(beside_python)
    found = shutil.which("nvdisasm")
    if found is None:
        raise FileNotFoundError("no nvdisasm was found: python tools/get_nvdisasm.py")
    return found


def disassemble(cubin: bytes) -> MachineCode:
    """The code of the cubin's only kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [find_nvdisasm(), "-c", file.name]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"nvdisasm: {result.stderr.strip()}")
    return parse(result.stdout)


def parse(text: str) -> MachineCode:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            target = _TARGET.search(found["rest"])
            instructions.append(
                Instruction(
                    found["op"],
                    (found["guard"] or "").strip(),
                    found["rest"],
                    target[0] if target else None,
                    bool(found["pair"]),
                )
            )
    return MachineCode(instructions, labels)


class MachineCode:
    """A kernel's instructions and their flow. A basic block is named by its first instruction.

    Attributes:
        ends: where each basic block ends (exclusive).
        successors: of each basic block.
    """

    def __init__(self, instructions: list[Instruction], labels: dict[str, int]):
        self.instructions, self.labels = instructions, labels
        jumps = {i + 1 for i, x in enumerate(instructions) if x.kind in _JUMPS}
        starts = sorted({0, *labels.values(), *jumps} - {len(instructions)})
        self.ends = dict(zip(starts, [*starts[1:], len(instructions)], strict=True))
        self.successors = {start: self._successors(end) for start, end in self.ends.items()}

    def block(self, start: int) -> list[Instruction]:
        return self.instructions[start : self.ends[start]]

    def _successors(self, end: int) -> list[int]:
        last = self.instructions[end - 1]
        found = []
        if last.kind in _JUMPS and last.kind not in ("CALL", "CAL") and last.target in self.labels:
            found.append(self.labels[last.target])
        conditional = last.guard or re.match(r"\s*!?(U?P\d|CC)", last.operands)
        if last.kind not in _NEVER_GO_ON or conditional:
            found.append(end)
        return [start for start in found if start in self.ends]

    @cached_property
    def loops(self) -> dict[int, frozenset[int]]:
        """Natural loops: the basic blocks of each, by its first."""
        order: dict[int, str] = {0: "open"}
        back_edges = []
        stack = [(0, iter(self.successors[0]))]
        while stack:
            block, following = stack[-1]
            successor = next(following, None)
            if successor is None:
                order[block] = "done"
                stack.pop()
            elif successor not in order:
                order[successor] = "open"
                stack.append((successor, iter(self.successors[successor])))
            elif order[successor] == "open":
                back_edges.append((block, successor))
        predecessors: dict[int, set[int]] = {}
        for block in order:
            for successor in self.successors[block]:
                predecessors.setdefault(successor, set()).add(block)
        found: dict[int, set[int]] = {}
        for block, head in back_edges:
            body, todo = found.setdefault(head, {head}), [block]
            while todo:
                each = todo.pop()
                if each not in body:
                    body.add(each)
                    todo += predecessors.get(each, ())
        return {head: frozenset(body) for head, body in found.items()}

    def loops_within(self, head: int | None) -> list[int]:
        """The loops directly inside the loop of ``head`` (None: inside none)."""
        inside = [h for h, b in self.loops.items() if head is None or b < self.loops[head]]
        return [h for h in inside if not any(self.loops[h] < self.loops[o] for o in inside)]
