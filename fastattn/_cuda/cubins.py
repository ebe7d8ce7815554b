"""Compiled kernels, kept on disk from one process to the next.

A file is named by a hash of the kernel's sources, its name, the architecture and the compiler.
Files appear whole or not at all, so any number of processes may compile at once; a damaged one is
compiled again. The least recently used go when there are too many bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
from pathlib import Path

from fastattn._cuda import nvrtc, sources
from fastattn._cuda.folder import cache_folder, write_atomically
from fastattn._cuda.kernel import Kernel

MAX_BYTES = 512 << 20
_SUFFIX = ".cubin"
_lock = threading.Lock()
_compiled: dict[tuple[str, str, int], nvrtc.Compiled] = {}


def get(kernel: Kernel, capability: int) -> nvrtc.Compiled:
    """The kernel for a card of ``capability`` (60 for sm_60), compiled unless it is kept.

    Raises:
        CompileError: it can't be compiled here.
        ValueError: FASTATTN_CACHE_DIR names a folder that isn't private.
    """
    key = (kernel.source, kernel.name, capability)
    with _lock:
        if key not in _compiled:
            library, arch = nvrtc.choose(capability)
            path = file_of(kernel, arch, library)
            compiled = _read(path)
            if compiled is None:
                compiled = library.compile(kernel.source, kernel.name, arch)
                _write(path, compiled)
            _compiled[key] = compiled
        return _compiled[key]


def is_kept(kernel: Kernel, capability: int) -> bool:
    """Whether ``get`` would find the kernel without compiling it."""
    library, arch = nvrtc.choose(capability)
    return _read(file_of(kernel, arch, library)) is not None


def file_of(kernel: Kernel, arch: int, library: nvrtc.Nvrtc) -> Path:
    """Where the kernel is kept, whether it is there or not."""
    state = [sources.digest(kernel.source), kernel.name, str(arch), library.state()]
    name = hashlib.sha256("\0".join(state).encode()).hexdigest()[:40]
    return _folder() / f"{name}{_SUFFIX}"


@functools.cache
def _folder() -> Path:
    folder = cache_folder() / "cubin"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _read(path: Path) -> nvrtc.Compiled | None:
    """What the file holds, or None if there is none or it is damaged."""
    try:
        head, cubin = path.read_bytes().split(b"\n", 1)
        said = json.loads(head)
        if said["sha256"] != hashlib.sha256(cubin).hexdigest():
            return None
        os.utime(path)
        return nvrtc.Compiled(cubin, said["function"], said["log"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, compiled: nvrtc.Compiled) -> None:
    said = {
        "sha256": hashlib.sha256(compiled.cubin).hexdigest(),
        "function": compiled.function,
        "log": compiled.log,
    }
    try:
        write_atomically(path, json.dumps(said).encode() + b"\n" + compiled.cubin)
        _trim(path.parent)
    except OSError:
        pass  # the kernel runs all the same; a full disk costs compiling again


def _trim(folder: Path) -> None:
    """Remove the least recently used files until at most MAX_BYTES remain."""
    files = []
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        files.append((found.st_mtime_ns, found.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= MAX_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= size
