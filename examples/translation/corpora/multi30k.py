"""Multi30k (Elliott et al., 2016): 29,000 captions of photographs, translated; test_2016_flickr."""

from __future__ import annotations

from pathlib import Path

from examples.translation.corpora.base import FilePair, RawCorpus
from examples.translation.corpora.download import fetch, why_no_answer
from examples.translation.data import CorpusError

HOME = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
LANGUAGES = ("en", "de", "fr", "cs")
_STEMS = ("train", "val", "test_2016_flickr")


def load(source: str, target: str, cache: Path) -> RawCorpus:
    """The task 1 text for two of LANGUAGES."""
    for language in (source, target):
        if language not in LANGUAGES:
            raise CorpusError(f"multi30k has no {language!r}, it has {', '.join(LANGUAGES)}")
    splits = []
    for stem in _STEMS:
        names = (f"{stem}.{language}.gz" for language in (source, target))
        splits.append([FilePair(*(fetch(f"{HOME}/{name}", _folder(cache)) for name in names))])
    return RawCorpus("multi30k", source, target, *splits)


def is_cached(source: str, target: str, cache: Path) -> bool:
    """Whether `load` needs no network."""
    names = (f"{stem}.{language}.gz" for stem in _STEMS for language in (source, target))
    return all((_folder(cache) / name).is_file() for name in names)


def why_unreachable(source: str, target: str) -> str | None:
    """None if the home of multi30k answers within seconds and has these languages."""
    for language in (source, target):
        if language not in LANGUAGES:
            return f"it has no {language!r}"
    return why_no_answer(f"{HOME}/val.{source}.gz")


def _folder(cache: Path) -> Path:
    return cache / "multi30k"
