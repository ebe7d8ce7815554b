"""A folder of parallel text files, found by their names.

`train.en`, `val.de`, `test.de` and the like; Multi30k's, WMT's and fairseq's names are known too.
Each may end in ``.gz`` or ``.xz``, and may carry the pair: `train.en-de.en`.
"""

from __future__ import annotations

from pathlib import Path

from examples.translation.corpora.base import FilePair, RawCorpus
from examples.translation.data import CorpusError

STEMS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "dev", "validation", "newstest2013"),
    "test": ("test", "test_2016_flickr", "test2016", "newstest2014"),
}
_PACKED = ("", ".gz", ".xz")


def load(folder: str | Path, source: str, target: str) -> RawCorpus:
    """The train, val and test files of `folder` for the two languages.

    Raises CorpusError that names the folder, the split and the names looked for.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CorpusError(f"files:{folder}: there is no such folder")
    splits = {split: [_find(folder, split, source, target)] for split in STEMS}
    return RawCorpus(f"files:{folder.resolve().name}", source, target, **splits)


def _find(folder: Path, split: str, source: str, target: str) -> FilePair:
    for stem in STEMS[split]:
        found = [_file(folder, stem, language, source, target) for language in (source, target)]
        if all(found):
            return FilePair(*found)
        if any(found):
            lacking = target if found[0] else source
            raise CorpusError(
                f"{folder} has {(found[0] or found[1]).name}, but not {stem}.{lacking} beside it"
            )
    names = ", ".join(f"{stem}.{source} and {stem}.{target}" for stem in STEMS[split])
    raise CorpusError(f"{folder} has no {split} files; looked for {names} (also .gz and .xz)")


def _file(folder: Path, stem: str, language: str, source: str, target: str) -> Path | None:
    for pair in ("", f".{source}-{target}", f".{target}-{source}"):
        for packed in _PACKED:
            path = folder / f"{stem}{pair}.{language}{packed}"
            if path.is_file():
                return path
    return None
