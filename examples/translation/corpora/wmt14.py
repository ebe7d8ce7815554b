"""WMT 2014 English-German and English-French, as the paper's section 5.1 trains on them.

Development set newstest2013, test set newstest2014 in full (3,003 sentences).
"""

from __future__ import annotations

import re
from pathlib import Path

from examples.translation.corpora.base import FilePair, RawCorpus
from examples.translation.corpora.download import extract, fetch
from examples.translation.data import CorpusError
from examples.translation.lines import read_lines, write_lines

HOME = "https://www.statmt.org"
# archive -> stem of the two files in it ("{xx}" is de or fr)
_COMMON = {
    "wmt13/training-parallel-europarl-v7.tgz": "training/europarl-v7.{xx}-en",
    "wmt13/training-parallel-commoncrawl.tgz": "commoncrawl.{xx}-en",
    "wmt14/training-parallel-nc-v9.tgz": "training/news-commentary-v9.{xx}-en",
}
_FRENCH_ONLY = {
    "wmt13/training-parallel-un.tgz": "un/undoc.2000.{xx}-en",
    "wmt10/training-giga-fren.tar": "giga-fren.release2.fixed",
}
_DEV, _TEST = "wmt14/dev.tgz", "wmt14/test-full.tgz"
_SEGMENT = re.compile(r"<seg[^>]*>(.*)</seg>")


def load_ende(source: str, target: str, cache: Path) -> RawCorpus:
    """About 4.5M pairs, in either direction."""
    return _load("wmt14-ende", "de", source, target, cache / "wmt14", _COMMON)


def load_enfr(source: str, target: str, cache: Path) -> RawCorpus:
    """About 36M pairs (40M lines), in either direction."""
    return _load("wmt14-enfr", "fr", source, target, cache / "wmt14", _COMMON | _FRENCH_ONLY)


def _load(
    name: str, other: str, source: str, target: str, folder: Path, archives: dict[str, str]
) -> RawCorpus:
    if {source, target} != {"en", other}:
        raise CorpusError(f"{name} translates between en and {other}, not {source} to {target}")
    text = folder / "text"
    train = []
    for archive, stem in archives.items():
        packed = ".gz" if "giga-fren" in stem else ""
        members = [f"{stem.format(xx=other)}.{side}{packed}" for side in (source, target)]
        train.append(FilePair(*extract(fetch(f"{HOME}/{archive}", folder), members, text)))
    members = [f"dev/newstest2013.{side}" for side in (source, target)]
    val = FilePair(*extract(fetch(f"{HOME}/{_DEV}", folder), members, text))
    pair = f"{other}en"
    members = [
        f"test-full/newstest2014-{pair}-src.{source}.sgm",
        f"test-full/newstest2014-{pair}-ref.{target}.sgm",
    ]
    marked_up = extract(fetch(f"{HOME}/{_TEST}", folder), members, text)
    test = FilePair(*(_as_text(path, path.with_suffix("")) for path in marked_up))
    return RawCorpus(name, source, target, train, [val], [test])


def _as_text(sgm: Path, path: Path) -> Path:
    segments = (_SEGMENT.search(line) for line in read_lines(sgm))
    write_lines(path, (found.group(1).strip() for found in segments if found))
    return path
