"""What one pass of a kernel's tile loop executes, instruction by instruction.

The tile loop is the innermost loop that holds all products; its pass is followed along the path of
inner tiles: through every loop of multiply-adds and, where there is a choice, with the fewest
instructions. Loops inside count as often as they run: a loop without multiply-adds once; an
innermost loop of multiply-adds as often as it takes for one product; one around such a loop as
often as it is told.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tools.gates.machine_code import MachineCode

_FEWEST_IN_A_MATH_LOOP = 16


class Pass(NamedTuple):
    """One pass of the tile loop of one thread (of one warp, for tensor cores).

    counts: executed instructions by kind ("FFMA", "LDS", ..).
    math_counts: those of the innermost loops of multiply-adds.
    paired: how many were issued together with another (sm_60 can).
    narrow_loads: global loads of less than 16 bytes.
    """

    counts: Counter[str]
    math_counts: Counter[str]
    paired: int
    narrow_loads: int

    def share(self, kind: str) -> float:
        return self.counts[kind] / self.counts.total()

    def math_share(self, kind: str) -> float:
        return self.math_counts[kind] / self.math_counts.total() if self.math_counts else 0.0


_NOTHING = Pass(Counter(), Counter(), 0, 0)


def _add(a: Pass, b: Pass, times: int = 1) -> Pass:
    return Pass(
        a.counts + _scaled(b.counts, times),
        a.math_counts + _scaled(b.math_counts, times),
        a.paired + times * b.paired,
        a.narrow_loads + times * b.narrow_loads,
    )


def _scaled(counts: Counter[str], times: int) -> Counter[str]:
    return Counter({kind: n * times for kind, n in counts.items()})


class TileLoop:
    """The tile loop of ``code``; multiply-adds are instructions of ``kind`` ("FFMA" or "HMMA").

    Args:
        product: the multiply-adds of one product, which an innermost loop works on.
        pieces: how often a loop around such a loop runs.

    Raises:
        ValueError: there is no such loop.
    """

    def __init__(self, code: MachineCode, kind: str, product: int, pieces: int):
        self.code, self.kind, self.product, self.pieces = code, kind, product, pieces
        self.math_loops = {
            head for head, body in code.loops.items()
            if not code.loops_within(head) and self._multiplies(body) >= _FEWEST_IN_A_MATH_LOOP
        }  # fmt: skip
        tops = [h for h in code.loops_within(None) if self._multiplies(code.loops[h])]
        if not tops:
            raise ValueError(f"no loop with {kind}")
        self.head = max(tops, key=lambda h: self._multiplies(code.loops[h]))
        while (inside := self._only_loop_with_all(self.head)) is not None:
            self.head = inside

    def _multiplies(self, body: frozenset[int]) -> int:
        return sum(i.kind == self.kind for block in body for i in self.code.block(block))

    def _only_loop_with_all(self, head: int) -> int | None:
        """The loop just inside that holds all loops of multiply-adds, if there is one."""
        for inside in self.code.loops_within(head):
            if 1 < self._math_inside(inside) == self._math_inside(head):
                return inside
        return None

    def one_pass(self) -> Pass:
        return self._body(self.head)

    def _times(self, head: int) -> int:
        body = self.code.loops[head]
        if head in self.math_loops:
            return max(1, self.product // self._multiplies(body))
        return self.pieces if self._math_inside(head) else 1

    def _math_inside(self, head: int) -> int:
        return sum(self.code.loops[m] <= self.code.loops[head] for m in self.math_loops)

    def _body(self, head: int) -> Pass:
        """One pass of the loop of ``head`` along the path described above."""
        best: dict[int, tuple[tuple[int, int], Pass] | None] = {}
        inner = {h: self.code.loops[h] for h in self.code.loops_within(head)}

        def follow(block: int) -> tuple[tuple[int, int], Pass] | None:
            """(order of preference, counts) of the way from ``block`` back to ``head``."""
            if block not in best:
                best[block] = None
                best[block] = choose(block)
            return best[block]

        def choose(block: int) -> tuple[tuple[int, int], Pass] | None:
            if block in inner:
                here = _add(_NOTHING, self._body(block), self._times(block))
                if block in self.math_loops:
                    here = here._replace(math_counts=here.counts)
                math = self._math_inside(block)
                out = {s for b in inner[block] for s in self.code.successors[b]} - inner[block]
            else:
                here, math, out = self._block(block), 0, set(self.code.successors[block])
            ways = []
            for successor in out:
                if successor == head:
                    ways.append(((0, 0), _NOTHING))
                elif successor in self.code.loops[head] and (way := follow(successor)):
                    ways.append(way)
            if not ways:
                return None
            (missed, length), rest = min(ways, key=lambda way: way[0])
            return (missed - math, length + here.counts.total()), _add(here, rest)

        way = choose(head)
        if way is None:
            raise ValueError("a loop without a way back")
        return way[1]

    def _block(self, start: int) -> Pass:
        instructions = self.code.block(start)
        loads = [i for i in instructions if i.kind in ("LDG", "LD")]
        return Pass(
            Counter(i.kind for i in instructions),
            Counter(),
            sum(i.paired for i in instructions),
            sum("128" not in i.op for i in loads),
        )
