"""Which GPUs are here, whether this torch can run on them, and what helps where it can't."""

from __future__ import annotations

import os
import re
import subprocess
from typing import NamedTuple

import torch

# Facts of PyTorch's builds: cu126 holds code for compute capability 5.0 to 9.0 and is the last that
# serves cards older than 7.5; NVIDIA's R580 is the last driver for cards older than 7.5.
_CUDA_12_6 = "https://download.pytorch.org/whl/cu126"
_OLDEST_EVER = (5, 0)
_OLDEST_OF_CUDA_13 = (7, 5)
_LAST_DRIVER_OF_OLD_CARDS = 580
_FIRST_DRIVER = {12: 525, 13: 580}  # by the major version of CUDA; Linux

_SMI = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")


class Gpu(NamedTuple):
    """One GPU: torch's name of it (None if torch doesn't see it), and why torch can't use it."""

    device: str | None
    name: str
    capability: tuple[int, int]
    problem: str | None = None
    command: str | None = None


def find_gpus() -> list[Gpu]:
    """The GPUs torch sees; where it sees none, the NVIDIA GPUs the driver's own tool lists."""
    if torch.cuda.is_available():
        return [_seen_by_torch(index) for index in range(torch.cuda.device_count())]
    return [_unseen_by_torch(*found) for found in _ask_driver()]


def has_code_for(arch_list: list[str], capability: tuple[int, int]) -> bool:
    """Whether a build with ``torch.cuda.get_arch_list()`` of ``arch_list`` runs on ``capability``.

    Machine code (sm_XY) runs on its own major version from minor Y on, PTX (compute_XY) on anything
    newer. With the suffix "a" both run on exactly XY, with "f" only within their major version.
    """
    for entry in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", entry)
        if match is None:
            continue
        kind, major, minor, suffix = match.groups()
        built_for = (int(major), int(minor))
        same_major = built_for[0] == capability[0] and built_for[1] <= capability[1]
        if suffix == "a":
            fits = built_for == capability
        elif kind == "sm" or suffix == "f":
            fits = same_major
        else:
            fits = built_for <= capability
        if fits:
            return True
    return False


def install_command(capability: tuple[int, int], driver: int | None = None) -> str | None:
    """The command that installs a torch which runs on ``capability``, or None if there is none.

    ``driver`` is the major version of NVIDIA's driver. pip counts any installed torch as good
    enough, so only a forced reinstall changes the build.
    """
    if capability < _OLDEST_EVER:
        return None
    old_driver = driver is not None and driver < _FIRST_DRIVER[13]
    if capability < _OLDEST_OF_CUDA_13 or (old_driver and capability < (10, 0)):
        return f"pip install --force-reinstall torch --index-url {_CUDA_12_6}"
    return "pip install --force-reinstall torch"


def driver_note(capability: tuple[int, int]) -> str:
    """What to know about the driver of an old card; empty for others."""
    if capability >= _OLDEST_OF_CUDA_13:
        return ""
    return f" (the card needs an NVIDIA driver no newer than R{_LAST_DRIVER_OF_OLD_CARDS})"


def _seen_by_torch(index: int) -> Gpu:
    name, device = torch.cuda.get_device_name(index), f"cuda:{index}"
    capability = torch.cuda.get_device_capability(index)
    arch_list = torch.cuda.get_arch_list()
    if torch.version.hip is not None or has_code_for(arch_list, capability):
        return Gpu(device, name, capability)
    built = f"CUDA {torch.version.cuda}, {' '.join(arch_list)}"
    problem = f"this torch ({built}) holds no code for it"
    return Gpu(device, name, capability, *_with_help(problem, capability))


def _unseen_by_torch(name: str, capability: tuple[int, int], driver: str) -> Gpu:
    version = int(driver.split(".")[0])
    cuda = torch.version.cuda
    if cuda is None:
        problem = "this torch is a CPU build"
    elif version < _FIRST_DRIVER.get(int(cuda.split(".")[0]), 0):
        problem = f"its driver {driver} is too old for this torch (CUDA {cuda})"
    else:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if hidden is None else f"; CUDA_VISIBLE_DEVICES is {hidden!r}"
        return Gpu(None, name, capability, f"torch sees no GPU, though the driver does{why}")
    return Gpu(None, name, capability, *_with_help(problem, capability, version))


def _with_help(
    problem: str, capability: tuple[int, int], driver: int | None = None
) -> tuple[str, str | None]:
    command = install_command(capability, driver)
    if command is None:
        return f"{problem}, and no build of torch 2.7 or newer does", None
    return problem + driver_note(capability), command


def _ask_driver() -> list[tuple[str, tuple[int, int], str]]:
    """(name, capability, driver version) of every NVIDIA GPU; empty without driver or GPU."""
    try:
        answer = subprocess.run(_SMI, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in answer.stdout.splitlines():
        match = re.fullmatch(r"(.+), (\d+)\.(\d+), (\d+[\d.]*)", line.strip())
        if match is not None:
            name, major, minor, driver = match.groups()
            found.append((name, (int(major), int(minor)), driver))
    return found
