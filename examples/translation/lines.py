"""Reading and writing text where only ``\\n`` ends a line.

Python's text mode also ends lines at ``\\r``, and ``str.splitlines`` at U+2028, U+0085 and others.
A corpus that holds one of them inside a sentence then has one line more on one side, and every
later pair is wrong.
"""

from __future__ import annotations

import gzip
import lzma
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

_INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff]")
_CONTROL_OR_SPACE = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")


_BOM = b"\xef\xbb\xbf"


def open_bytes(path: str | Path):
    """`path` opened for reading bytes, unpacked if its name ends in ``.gz`` or ``.xz``."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(Path(path).suffix, open)
    return opener(path, "rb")


def iter_lines(path: str | Path) -> Iterator[str]:
    """The lines of a UTF-8 file without their ``\\n``; a last line without ``\\n`` counts too.

    Raises ValueError that names the file and the line where the bytes are not UTF-8.
    """
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(_BOM)
            try:
                yield line.removesuffix(b"\n").decode("utf-8")
            except UnicodeDecodeError:
                raise ValueError(f"{path} is not UTF-8 in line {number}") from None


def read_lines(path: str | Path) -> list[str]:
    """All of `iter_lines`."""
    return list(iter_lines(path))


def count_lines(path: str | Path) -> int:
    """The number of lines that `iter_lines` gives."""
    with open_bytes(path) as file:
        return sum(1 for _ in file)


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Writes each line, which must not hold ``\\n``, followed by ``\\n``."""
    with open(path, "wb") as file:
        for line in lines:
            if "\n" in line:
                raise ValueError(f"a line for {path} holds a line end: {line[:60]!r}")
            file.write(line.encode("utf-8") + b"\n")


def clean(text: str) -> str:
    """`text` in Unicode NFC, without invisible characters, and each run of spaces one space.

    Control characters, ``\\r``, U+2028 and U+0085 among them, count as spaces.
    """
    text = _INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    return _CONTROL_OR_SPACE.sub(" ", text).strip()
