"""Installs torch with this Python's pip, from the index whose build suits this machine.

    python tools/install_torch.py 'torch==2.13.0' [INDEX_URL]

pip's own index serves Linux users a CUDA build of some gigabytes, and none that still runs on cards
before compute capability 7.5; PyTorch's indexes have the others. Needs nothing but Python.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Callable

CPU = "https://download.pytorch.org/whl/cpu"
CUDA_12_6 = "https://download.pytorch.org/whl/cu126"
PROBE_SECONDS = 4
_OLDEST_OF_CUDA_13 = (7, 5)
_FIRST_DRIVER_OF_CUDA_13 = 580
_SMI = ("nvidia-smi", "--query-gpu=compute_cap,driver_version", "--format=csv,noheader")

Gpu = tuple[tuple[int, int], int]  # compute capability, major version of the driver


def find_gpus() -> list[Gpu] | None:
    """The NVIDIA GPUs of this machine; [] if it has some that nothing is known of, None if none."""
    try:
        answer = subprocess.run(_SMI, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        answer = ""
    found = re.findall(r"^(\d+)\.(\d+), (\d+)", answer, flags=re.MULTILINE)
    if found or os.path.exists("/dev/nvidia0"):
        return [((int(major), int(minor)), int(driver)) for major, minor, driver in found]
    return None


def choose_index(
    gpus: list[Gpu] | None, system: str, reaches: Callable[[str], bool]
) -> tuple[str | None, str]:
    """(index URL, or None for pip's own; why, in one sentence); ``system`` is platform.system()."""
    if gpus is None and system != "Linux":
        return None, "torch from pip's own index, a CPU build on this system"
    if gpus is None:
        if reaches(CPU):
            return CPU, "no NVIDIA GPU: torch's CPU build"
        return None, (
            f"no NVIDIA GPU, but {CPU} can't be reached: torch from pip's own index, "
            "which may be the CUDA build of some gigabytes"
        )
    for capability, driver in gpus:
        if capability < _OLDEST_OF_CUDA_13:
            return (
                CUDA_12_6,
                f"a GPU of compute capability {_dotted(capability)}: torch for CUDA 12.6",
            )
        if driver < _FIRST_DRIVER_OF_CUDA_13 and capability < (10, 0):
            return CUDA_12_6, f"NVIDIA driver {driver}: torch for CUDA 12.6"
    return None, "an NVIDIA GPU: torch from pip's own index, on Linux a CUDA build"


def reaches(url: str) -> bool:
    """Whether ``url`` answers within a few seconds."""
    request = urllib.request.Request(f"{url}/torch/", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print("usage: python tools/install_torch.py SPEC [INDEX_URL]", file=sys.stderr)
        return 2
    spec = shlex.split(arguments[0])
    if len(arguments) == 2:
        index, why = arguments[1], f"torch from {arguments[1]}, as asked"
    else:
        index, why = choose_index(find_gpus(), platform.system(), reaches)
    print(f"{' '.join(spec)}: {why}", flush=True)
    options = [] if index is None else ["--index-url", index]
    return subprocess.call([sys.executable, "-m", "pip", "install", *spec, *options])


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
