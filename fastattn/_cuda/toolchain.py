"""Builds the emulator and its kernels with the C++ compiler at hand, and keeps what it built.

Environment: CXX names the compiler. FASTATTN_EMULATOR_SANITIZE=address,undefined builds with these
sanitizers; AddressSanitizer's library must then be loaded into the process first (LD_PRELOAD).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fastattn._cuda import headers, sources
from fastattn._cuda.folder import cache_folder

_FLAGS = (
    "-std=c++17 -O1 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno "
    "-Wall -Wextra -Wno-unknown-pragmas -Wno-unused-parameter -DFASTATTN_EMULATOR=1"
).split()
_CORE = ("fiber", "collectives", "shared_memory", "launch")
_KEPT_SECONDS = 14 * 24 * 3600
_LANGUAGE = "emulator/cuda_language.h"
_HEADERS = (("cuda_fp16.h", "vector_types.h"), ("crt/host_defines.h", None), ("nv/target", None))


class Toolchain(NamedTuple):
    """A compiler with its flags, and the folder for what it builds."""

    command: tuple[str, ...]
    folder: Path

    @property
    def core(self) -> Path:
        return self.folder / "core.so"

    @property
    def prelude(self) -> Path:
        return self.folder / "prelude.h"


@functools.cache
def why_not() -> str | None:
    """One sentence why kernels can't be built for the emulator here, or None if they can."""
    if not sys.platform.startswith("linux"):
        return "the emulator needs Linux"
    if not (sources.root() / _LANGUAGE).is_file():
        return "the emulator's sources are in the repository, not in the installed package"
    if shutil.which(_compiler()[0]) is None:
        return f"the emulator needs a C++ compiler; {_compiler()[0]} was not found"
    for header, beside in _HEADERS:
        if headers.find(header, beside=beside) is None:
            return (
                f"the emulator needs NVIDIA's header {header}: pip install "
                "nvidia-cuda-runtime-cu12 nvidia-cuda-cccl-cu12 nvidia-cuda-crt"
            )
    return None


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


@functools.cache
def toolchain(sanitizers: str) -> Toolchain:
    """The compiler with ``sanitizers`` ("" or "address", "undefined", both), the core built.

    Raises:
        RuntimeError: it can't be used here, or the core does not compile.
    """
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    command = [*_compiler(), *_FLAGS]
    if sanitizers:
        command += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g1"]
        command += ["-ftrivial-auto-var-init=pattern"]
    places = [headers.find(header, beside=beside) for header, beside in _HEADERS]
    for place in dict.fromkeys(places):
        command += ["-isystem", str(place)]
    command += ["-I", str(sources.root())]
    version = subprocess.run(
        [*_compiler(), "--version"], capture_output=True, text=True, check=True
    ).stdout
    core = [f"emulator/{name}.cpp" for name in _CORE]
    state = [version, *command, *map(sources.digest, [*core, _LANGUAGE, "emulator/kernel_entry.h"])]
    found = Toolchain(tuple(command), _folder(state))
    with locked(found.core):
        if not found.core.exists():
            _build_core(found, [str(sources.root() / name) for name in core])
    return found


def _folder(state: list[str]) -> Path:
    key = hashlib.sha256("\0".join(state).encode()).hexdigest()[:16]
    folder = cache_folder() / "emulator" / key
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.utime(folder)
    _forget_old(folder.parent)
    return folder


def _forget_old(parent: Path) -> None:
    """Remove what no process has used for long: every change of the emulator leaves some 40 MB."""
    for folder in parent.iterdir():
        if time.time() - folder.stat().st_mtime > _KEPT_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _build_core(tools: Toolchain, core: list[str]) -> None:
    """The scheduler as a library, and CUDA's language as a precompiled header."""
    tools.prelude.write_text(f'#include "{_LANGUAGE}"\n#include "emulator/kernel_entry.h"\n')
    compile_to(tools, tools.folder / "prelude.h.gch", ["-x", "c++-header", str(tools.prelude)])
    compile_to(tools, tools.core, ["-fvisibility=default", "-shared", *core])


def compile_to(tools: Toolchain, target: Path, arguments: list[str]) -> None:
    """Run the compiler; ``target`` appears whole or not at all.

    Raises:
        RuntimeError: with what the compiler says.
    """
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=target.suffix)
    os.close(handle)
    # The compiler itself has no use for a sanitizer's library.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    result = subprocess.run(
        [*tools.command, *arguments, "-o", name], env=environment, capture_output=True, text=True
    )
    if result.returncode != 0:
        os.unlink(name)
        raise RuntimeError(f"{target.name} does not compile:\n{result.stderr}")
    if result.stderr:
        print(result.stderr, file=sys.stderr)
    os.replace(name, target)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes and threads from building ``path`` meanwhile."""
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
