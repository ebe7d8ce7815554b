"""Few cases that still meet every pair of settings: a greedy covering array of strength two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any

Case = dict[str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Cases in which any two values of any two factors meet at least once; always the same list."""
    names = list(factors)
    missing = {
        ((a, i), (b, j)): None
        for a, b in combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }  # a dict, not a set: its order is part of the result
    random = Random(0)  # breaks ties, so that factors don't move in step
    cases = []
    while missing:
        chosen: dict[str, int] = dict(next(iter(missing)))
        for name in names:
            if name not in chosen:
                chosen[name] = _best_value(name, len(factors[name]), chosen, missing, names, random)
        for pair in combinations([(name, chosen[name]) for name in names], 2):
            missing.pop(pair, None)
        cases.append({name: factors[name][chosen[name]] for name in names})
    return cases


def sampled(factors: Mapping[str, Sequence[Any]], count: int, seed: int = 0) -> list[Case]:
    """``count`` cases drawn at random from all combinations; always the same list."""
    random = Random(seed)
    return [{name: random.choice(values) for name, values in factors.items()} for _ in range(count)]


def label(case: Case, defaults: Case) -> str:
    """A test's name: the values of ``case`` that are not ``defaults``'s."""
    told = (_word(v) for name, v in case.items() if v != defaults[name])
    return "-".join(told) or "plain"


def _best_value(
    name: str,
    values: int,
    chosen: dict[str, int],
    missing: dict,
    names: list[str],
    random: Random,
) -> int:
    def gain(value: int) -> int:
        others = ((other, at) for other, at in chosen.items() if other != name)
        return sum(_ordered((name, value), other, names) in missing for other in others)

    return max(random.sample(range(values), values), key=gain)


def _ordered(a: tuple[str, int], b: tuple[str, int], names: list[str]) -> tuple:
    return (a, b) if names.index(a[0]) < names.index(b[0]) else (b, a)


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(_word(v) for v in value)
    return str(value).removeprefix("torch.").replace(" ", "_")
