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
from collections.abc import Iterable
from pathlib import Path

_INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff]")
_CONTROL_OR_SPACE = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")


def read_bytes(path: str | Path) -> bytes:
    """The content of `path`, unpacked if its name ends in ``.gz`` or ``.xz``."""
    path = Path(path)
    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".xz":
        return lzma.decompress(data)
    return data


def split_lines(data: bytes, name: str = "text") -> list[str]:
    """UTF-8 `data` as its lines, without their ``\\n``; a last line without ``\\n`` counts too.

    Raises ValueError that names `name` and the line where the bytes are not UTF-8.
    """
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    try:
        return [line.decode("utf-8") for line in lines]
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8 in line {_first_bad_line(lines)}") from None


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 file (plain, ``.gz`` or ``.xz``); see `split_lines`."""
    return split_lines(read_bytes(path), str(path))


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


def _first_bad_line(lines: list[bytes]) -> int:
    for number, line in enumerate(lines, start=1):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            return number
    raise AssertionError("every line is UTF-8")
