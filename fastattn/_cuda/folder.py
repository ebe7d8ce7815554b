"""The folder where compiled kernels are kept: one that nobody but the user can write.

FASTATTN_CACHE_DIR, else fastattn in XDG_CACHE_HOME, else ~/.cache/fastattn. Where that can't be
written, a private temporary folder stands in for the life of the process.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

VARIABLE = "FASTATTN_CACHE_DIR"


@functools.cache
def cache_folder() -> Path:
    """The folder, made if need be.

    Raises:
        ValueError: FASTATTN_CACHE_DIR names a folder that is another's, or that others can write:
            whoever can write it could have this process run code of theirs.
    """
    chosen = os.environ.get(VARIABLE)
    folder = Path(chosen) if chosen else _default()
    reason = _why_not(folder)
    if reason is None:
        return folder
    if chosen and "written" not in reason:
        raise ValueError(f"{VARIABLE}: {reason}")
    private = Path(tempfile.mkdtemp(prefix="fastattn-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    warnings.warn(
        f"compiled kernels are kept for this process only, for {reason}; {VARIABLE} names another "
        "folder",
        stacklevel=2,
    )
    return private


def _default() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "fastattn"


def _why_not(folder: Path) -> str | None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        return f"{folder} can't be written ({error.strerror})"
    if found.st_uid != os.geteuid():
        return f"{folder} belongs to another user"
    if stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} can be changed by other users; chmod 700 makes it private"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} can't be written"
    return None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that other processes see whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
