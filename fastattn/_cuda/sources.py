"""The kernels' sources, which travel with the package, and what identifies their state."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@functools.cache
def root() -> Path:
    """The folder csrc: within the installed package, or of the working tree in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


@functools.cache
def included(source: str) -> tuple[str, ...]:
    """``source`` and all it includes from csrc, sorted.

    Raises:
        FileNotFoundError: there is no such file below csrc.
    """
    found: set[str] = set()
    todo = [source]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += _INCLUDE.findall((root() / name).read_text(encoding="utf-8"))
    return tuple(sorted(found))


@functools.cache
def digest(source: str) -> str:
    """A hash of the text of ``source`` and of all it includes from csrc."""
    total = hashlib.sha256()
    for name in included(source):
        text = (root() / name).read_bytes()
        total.update(f"{name}\0{len(text)}\0".encode() + text)
    return total.hexdigest()
