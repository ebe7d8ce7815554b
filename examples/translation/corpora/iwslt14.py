"""IWSLT 2014 German-English (TED talks), from the archive that fairseq's script fetches.

Every 23rd training pair is for validation and five sets together are the test, as in that script;
unlike there the text is neither tokenised, lower-cased, nor filtered by the ratio of lengths.
"""

from __future__ import annotations

import re
from pathlib import Path

from examples.translation.corpora.base import FilePair, RawCorpus
from examples.translation.corpora.download import extract, fetch
from examples.translation.data import CorpusError
from examples.translation.lines import read_lines, write_lines

HOME = "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14"
_TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
# Whole lines about a talk; its title and description are text to translate.
_ABOUT = re.compile(r"\s*</?(url|talkid|keywords|speaker|reviewer|translator|doc)\b")
_TAG = re.compile(r"</?(title|description)>")
_SEGMENT = re.compile(r"<seg[^>]*>(.*)</seg>")


def load(source: str, target: str, cache: Path) -> RawCorpus:
    """About 160,000 pairs, in either direction."""
    if {source, target} != {"de", "en"}:
        raise CorpusError(f"iwslt14 translates between de and en, not {source} to {target}")
    folder = cache / "iwslt14"
    archive = fetch(f"{HOME}/de-en.tgz", folder)
    sides = {"train": [], "val": [], "test": []}
    for side in (source, target):
        names = [f"de-en/IWSLT14.{name}.de-en.{side}.xml" for name in _TESTS]
        training, *tests = extract(archive, [f"de-en/train.tags.de-en.{side}", *names], folder)
        lines = _training_lines(training)
        chosen = {
            "train": [line for number, line in enumerate(lines, 1) if number % 23],
            "val": lines[22::23],
            "test": [line for path in tests for line in _segments(path)],
        }
        for split, text in chosen.items():
            path = folder / f"{split}.{side}"
            write_lines(path, text)
            sides[split].append(path)
    splits = {split: [FilePair(*paths)] for split, paths in sides.items()}
    return RawCorpus("iwslt14", source, target, **splits)


def _training_lines(path: Path) -> list[str]:
    return [_TAG.sub("", line).strip() for line in read_lines(path) if not _ABOUT.match(line)]


def _segments(path: Path) -> list[str]:
    found = (_SEGMENT.search(line) for line in read_lines(path))
    return [segment.group(1).strip() for segment in found if segment]
