"""Where parallel text comes from: one module for each kind of corpus.

`open_corpus` turns a name into aligned text files on this machine, downloading them if need be:

    files:DIR       train/val/test files in a folder of your own (files.py)
    multi30k        29,000 image captions, en, de, fr, cs (multi30k.py)
    wmt14-ende      the paper's 4.5M English-German pairs (wmt14.py)
    wmt14-enfr      the paper's 36M English-French pairs (wmt14.py)
    iwslt14         TED talks, German-English (iwslt14.py)
    catalogs        a smoke corpus: messages of well-translated programs (catalogs.py)
"""

from __future__ import annotations

import os
from pathlib import Path

from examples.translation.corpora import catalogs, files, iwslt14, multi30k, wmt14
from examples.translation.corpora.base import FilePair, RawCorpus
from examples.translation.data import CorpusError

__all__ = ["NAMES", "FilePair", "RawCorpus", "cache_folder", "default_corpus", "open_corpus"]

_NAMED = {
    "multi30k": multi30k.load,
    "wmt14-ende": wmt14.load_ende,
    "wmt14-enfr": wmt14.load_enfr,
    "iwslt14": iwslt14.load,
    "catalogs": catalogs.load,
}
NAMES = (*_NAMED, "files:DIR")


def cache_folder() -> Path:
    """Where downloads are kept: ``$XDG_CACHE_HOME/fastattn``, by default ``~/.cache/fastattn``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastattn"


def open_corpus(
    name: str, source: str = "en", target: str = "de", cache: str | Path | None = None
) -> RawCorpus:
    """The corpus called `name` (see NAMES) for translation from `source` to `target`.

    Raises CorpusError, in one sentence, where the name is unknown, a file is missing, or a
    download fails.
    """
    if source == target:
        raise CorpusError(f"source and target are both {source!r}")
    if name.startswith("files:"):
        return files.load(name.removeprefix("files:"), source, target)
    if name not in _NAMED:
        raise CorpusError(f"unknown corpus {name!r}: choose from {', '.join(NAMES)}")
    return _NAMED[name](source, target, Path(cache) if cache else cache_folder())


def default_corpus(
    source: str = "en", target: str = "de", cache: str | Path | None = None
) -> tuple[str, str]:
    """(name, why): multi30k where it is at hand or its home answers at once, else catalogs."""
    folder = Path(cache) if cache else cache_folder()
    if multi30k.is_cached(source, target, folder):
        return "multi30k", "it was downloaded before"
    no_answer = multi30k.why_unreachable(source, target)
    if no_answer is None:
        return "multi30k", "its home answers"
    return "catalogs", f"the home of multi30k does not answer ({no_answer})"
