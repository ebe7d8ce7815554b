"""Two texts side by side: checked for alignment, cleaned, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from examples.translation.corpora.base import FilePair
from examples.translation.data import CorpusError
from examples.translation.lines import clean, count_lines, iter_lines, write_lines

SIDES = ("src", "tgt")


def check_aligned(pair: FilePair) -> None:
    """Raises CorpusError with both counts and the first line without partner, if there is one."""
    for path in pair:
        if not Path(path).is_file():
            raise CorpusError(f"no such file: {path}")
    counts = [count_lines(path) for path in pair]
    if counts[0] != counts[1]:
        shorter, longer = sorted((0, 1), key=lambda side: counts[side])
        text = next(islice(iter_lines(pair[longer]), counts[shorter], None))
        raise CorpusError(
            f"{pair.source} has {counts[0]} lines, but {pair.target} has {counts[1]}: "
            f"{Path(pair[shorter]).name} lacks line {counts[shorter] + 1}, "
            f"the partner of {text[:60]!r}"
        )


def read_pairs(files: list[FilePair]) -> Iterator[tuple[str, str]]:
    """The line pairs of all `files`, one after the other."""
    for pair in files:
        yield from zip(*map(iter_lines, pair), strict=True)


def copy_test(files: list[FilePair], folder: Path) -> tuple[dict, set[str]]:
    """Writes test.src and test.tgt line for line; returns the split's counts, and its sources."""
    lines = [(a.removesuffix("\r"), b.removesuffix("\r")) for a, b in read_pairs(files)]
    if not lines:
        raise CorpusError(f"{files[0].source} is empty")
    for side, column in zip(SIDES, zip(*lines, strict=True), strict=True):
        write_lines(folder / f"test.{side}", column)
    sources = [clean(source) for source, _ in lines]
    counts = {
        "files": [Path(path).name for pair in files for path in pair],
        "pairs": len(lines),
        "empty_sources": sources.count(""),
    }
    return counts, set(sources)


def clean_text(files: list[FilePair], paths: list[Path], drop_repeated: bool) -> dict:
    """Writes the cleaned pairs that are kept as text; returns their split's counts."""
    dropped: Counter[str] = Counter()
    seen: set[int] = set()
    lines = pairs = 0
    with open(paths[0], "wb") as source_file, open(paths[1], "wb") as target_file:
        for source, target in read_pairs(files):
            lines += 1
            source, target = clean(source), clean(target)
            if not (source and target):
                sides = "source" if target else "target" if source else "source and target"
                dropped[f"empty {sides}"] += 1
                continue
            if drop_repeated:
                pair = hash((source, target))
                if pair in seen:
                    dropped["repeated pair"] += 1
                    continue
                seen.add(pair)
            source_file.write(f"{source}\n".encode())
            target_file.write(f"{target}\n".encode())
            pairs += 1
    if not pairs:
        raise CorpusError(f"no pair is left of {files[0].source} and {files[0].target}")
    return {"lines": lines, "pairs": pairs, "dropped": dict(dropped)}
