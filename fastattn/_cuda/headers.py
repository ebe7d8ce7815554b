"""Finds NVIDIA's header files (cuda_fp16.h and what it includes)."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from pathlib import Path


@functools.cache
def folders() -> tuple[Path, ...]:
    """Folders that may hold CUDA's headers, the best first: packages from PyPI, then a toolkit."""
    found: list[Path] = []
    spec = find_spec("nvidia")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        found += sorted(Path(package).glob("*/include"))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            found.append(Path(os.environ[variable], "include"))
    found.append(Path("/usr/local/cuda/include"))
    return tuple(found)


def find(header: str, *, beside: str | None = None) -> Path | None:
    """The first folder that holds ``header`` (and ``beside``), or None."""
    for folder in folders():
        for place in (folder, folder / "cccl"):
            if (place / header).is_file() and (beside is None or (place / beside).is_file()):
                return place
    return None
