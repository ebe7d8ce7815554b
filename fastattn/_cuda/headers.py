"""Finds NVIDIA's header files: cuda_fp16.h and cuda_bf16.h for kernels, more for the emulator."""

from __future__ import annotations

import functools
import os
import re
from importlib.util import find_spec
from pathlib import Path


@functools.cache
def folders() -> tuple[Path, ...]:
    """Folders that may hold CUDA's headers, the best first: packages from PyPI, then a toolkit."""
    found: list[Path] = []
    spec = find_spec("nvidia")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        found += sorted(Path(package).glob("*/include"))
    if found_elsewhere := _ask_pathfinder():
        found.append(found_elsewhere)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            found.append(Path(os.environ[variable], "include"))
    found.append(Path("/usr/local/cuda/include"))
    return tuple(dict.fromkeys(found))


def _ask_pathfinder() -> Path | None:
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return None
    folder = find_nvidia_header_directory("cudart")
    return Path(folder) if folder else None


def find(header: str, *, beside: str | None = None, major: int | None = None) -> Path | None:
    """The first folder that holds ``header`` (and ``beside``), those of CUDA ``major`` first."""
    able = [
        place
        for folder in folders()
        for place in (folder, folder / "cccl")
        if (place / header).is_file() and (beside is None or (place / beside).is_file())
    ]
    able.sort(key=lambda place: major is not None and version(place) // 1000 != major)
    return able[0] if able else None


@functools.cache
def version(folder: Path) -> int:
    """CUDA's version of the headers in ``folder``, 12090 for 12.9; 0 if they don't say."""
    file = folder / "cuda_runtime_api.h"
    if not file.is_file():
        return 0
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", file.read_text(errors="replace"))
    return int(match[1]) if match else 0
