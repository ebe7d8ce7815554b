"""What every corpus is, whatever it was made from: pairs of aligned text files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class FilePair(NamedTuple):
    """Two UTF-8 text files (plain, ``.gz`` or ``.xz``) with one sentence a line, aligned."""

    source: Path
    target: Path


@dataclass(frozen=True)
class RawCorpus:
    """Text to prepare; a split may be spread over several file pairs."""

    name: str
    source: str  # language codes
    target: str
    train: list[FilePair]
    val: list[FilePair]
    test: list[FilePair]
    smoke: bool = False  # True: shows that all works; its scores compare with nothing
    notes: tuple[str, ...] = ()  # what a reader of the results must know
    details: dict[str, Any] = field(default_factory=dict)  # for the manifest
