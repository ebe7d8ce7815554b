"""What ``python -m fastattn`` says: versions, what is built, devices, the backends of every op."""

from __future__ import annotations

import os
import platform
import re
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fastattn
from fastattn import _native
from fastattn._dispatch import (
    AUTO,
    BACKENDS,
    backend_order,
    explain,
    registered_backends,
    registered_ops,
    requested,
)
from fastattn._gpus import find_gpus

NO_KERNEL = "no kernel in this version"


def collect() -> dict[str, Any]:
    """The whole status as plain data, ready for JSON. It computes nothing and changes nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the very GPUs that are reported here
        gpus = [gpu._asdict() for gpu in find_gpus()]
        devices = [torch.device("cpu"), *_usable_accelerators(gpus)]
        ops = {
            op: {str(device): backends(op, device) for device in devices} for op in registered_ops()
        }
    return {
        "fastattn": fastattn.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch_build": torch_build(),
        "triton": _version_of("triton"),
        "native": native(),
        "cuda": cuda(),
        "environment": environment(),
        "gpus": gpus,
        "devices": [str(device) for device in devices],
        "ops": ops,
        "backends_without_kernels": [
            name for name in BACKENDS if not any(name in registered_backends(op) for op in ops)
        ],
    }


def torch_build() -> str:
    """What this torch was built for: "CUDA 12.6", "ROCm 6.4" or "CPU"."""
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return "CPU" if torch.version.hip is None else f"ROCm {torch.version.hip}"


def native() -> dict[str, Any]:
    """Whether fastattn._C runs here, for which instruction sets it was built, and its threads."""
    try:
        reason = _native.why_not_available()
    except ValueError as error:
        reason = str(error)
    if reason is not None:
        return {"available": False, "reason": reason}
    return {
        "available": True,
        "instruction_sets": _native.isas_built(),
        "active": _native.isa(),
        "threads": _native.max_threads(),
        "torch_threads": torch.get_num_threads(),
        "shares_openmp": _native.lib().connect_openmp(),
        "openmp": loaded_openmp(),
    }


def cuda() -> dict[str, Any]:
    """What the CUDA kernels need: NVIDIA's driver, and compilers with what they compile for."""
    from fastattn._cuda import driver, nvrtc

    try:
        reason = driver.why_not()
    except ValueError as error:
        reason = str(error)
    compilers = []
    for library in nvrtc.found():
        try:
            headers: str | None = str(library.headers())
        except nvrtc.CompileError:
            headers = None
        compilers.append(
            {
                "version": "{}.{}".format(*library.version),
                "path": library.path,
                "headers": headers,
                "architectures": [f"sm_{arch}" for arch in library.architectures],
            }
        )
    return {
        "driver": None if reason else driver.version(),
        "why_no_driver": reason,
        "nvrtc": compilers,
        "install": None if compilers else nvrtc.INSTALL,
    }


def loaded_openmp() -> list[str]:
    """The OpenMP libraries in this process; one, where everybody shares torch's. Linux only."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    return sorted(set(re.findall(r"/.*/lib(?:gomp|iomp5|omp)\b.*\.so.*", maps.read_text())))


def environment() -> dict[str, str]:
    """The variables of fastattn that are set."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("FASTATTN_")}


def backends(op: str, device: torch.device) -> list[dict[str, Any]]:
    """The backends of ``op`` on ``device`` in the order they are asked, for a plain float32 call.

    Each is {"backend", "runs", "reason"}: at most one runs; a reason of None is one that could.
    """
    order = backend_order(device)
    try:
        found = explain(_SAMPLES[op], device)
    except (RuntimeError, ValueError) as error:
        return [{"backend": name, "runs": False, "reason": str(error)} for name in order]
    order += tuple(name for name in (found.chosen,) if name and name not in order)
    return [
        {
            "backend": name,
            "runs": name == found.chosen,
            "reason": found.reasons.get(name, NO_KERNEL),
        }
        for name in order
    ]


def render(status: dict[str, Any]) -> str:
    """The status for people."""
    head = (
        f"fastattn {status['fastattn']}, Python {status['python']}, {status['platform']}\n"
        f"torch {status['torch']} ({status['torch_build']} build), "
        f"triton {status['triton'] or 'not installed'}"
    )
    blocks = [
        head,
        _render_native(status["native"]),
        _render_devices(status),
        _render_cuda(status["cuda"]),
    ]
    if status["environment"]:
        blocks.append(_render_environment(status["environment"]))
    blocks.append(_render_ops(status["ops"]))
    if status["backends_without_kernels"]:
        blocks.append(f"Not in this version: {', '.join(status['backends_without_kernels'])}")
    return "\n\n".join(blocks)


def _render_native(found: dict[str, Any]) -> str:
    if not found["available"]:
        return f"Native kernels: none. {found['reason']}"
    lines = [
        f"Native kernels: built for {', '.join(found['instruction_sets'])}; "
        f"{found['active']} runs on this CPU"
    ]
    if not found["shares_openmp"]:
        lines.append("  one thread: torch's OpenMP library was not found")
        return "\n".join(lines)
    lines.append(f"  threads: {found['threads']}, governed by torch.set_num_threads")
    lines += [f"  OpenMP: {path}" for path in found["openmp"]]
    return "\n".join(lines)


def _render_devices(status: dict[str, Any]) -> str:
    lines = ["Devices"] + [f"  {device}" for device in status["devices"] if "cuda" not in device]
    for gpu in status["gpus"]:
        capability = "sm_{}{}".format(*gpu["capability"])
        line = f"  {gpu['device'] or 'unused'}: {gpu['name']}, {capability}"
        lines.append(line if gpu["problem"] is None else f"{line}: {gpu['problem']}")
        if gpu["command"]:
            lines.append(f"    what helps: {gpu['command']}")
    if not status["gpus"]:
        lines.append("  no GPU found by torch or nvidia-smi")
    return "\n".join(lines)


def _render_cuda(found: dict[str, Any]) -> str:
    lines = ["CUDA kernels"]
    lines.append(f"  driver: {found['why_no_driver'] or 'for CUDA ' + found['driver']}")
    for compiler in found["nvrtc"]:
        lines.append(f"  NVRTC {compiler['version']}: {compiler['path']}")
        lines.append(f"    headers: {compiler['headers'] or 'none; cuda_fp16.h was not found'}")
        lines.append(f"    compiles for {' '.join(compiler['architectures'])}")
    if found["install"]:
        lines.append(f"  no NVRTC to compile them; what helps: {found['install']}")
    return "\n".join(lines)


def _render_environment(variables: dict[str, str]) -> str:
    lines = ["Environment"] + [f"  {name}={value}" for name, value in variables.items()]
    known = (AUTO, *BACKENDS)
    if requested() not in known:
        lines.append(f"  unknown backend {requested()!r}; accepted are {', '.join(known)}")
    return "\n".join(lines)


def _render_ops(ops: dict[str, Any]) -> str:
    lines = ["Backends, in the order they are asked, for a plain float32 call"]
    for op, devices in ops.items():
        for device, rows in devices.items():
            lines.append(f"  {op} on {device}")
            for row in rows:
                says = "runs" if row["runs"] else row["reason"] or "can run"
                lines.append(f"    {row['backend']:<10} {says}")
    return "\n".join(lines)


def _usable_accelerators(gpus: list[dict[str, Any]]) -> list[torch.device]:
    if gpus:
        return [torch.device(gpu["device"]) for gpu in gpus if gpu["device"] and not gpu["problem"]]
    accelerator = torch.accelerator.current_accelerator()
    return [] if accelerator is None else [accelerator]


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _sample_attention(device: torch.device) -> Any:
    x = torch.zeros(1, 1, 1, 1, device=device)
    return fastattn.scaled_dot_product_attention(x, x, x)


def _sample_varlen(device: torch.device) -> Any:
    x = torch.zeros(1, 1, 1, device=device)
    lengths = torch.tensor([0, 1], dtype=torch.int32, device=device)
    return fastattn.varlen_attention(x, x, x, lengths, lengths)


def _sample_cross_entropy(device: torch.device) -> Any:
    x = torch.zeros(1, 1, device=device)
    target = torch.zeros(1, dtype=torch.int64, device=device)
    return fastattn.linear_cross_entropy(x, x, target)


_SAMPLES: dict[str, Callable[[torch.device], Any]] = {
    "attention": _sample_attention,
    "varlen_attention": _sample_varlen,
    "add_layer_norm": lambda device: fastattn.add_layer_norm(torch.zeros(1, 1, device=device)),
    "softmax": lambda device: fastattn.softmax(torch.zeros(1, 1, device=device)),
    "linear_cross_entropy": _sample_cross_entropy,
    "dropout": lambda device: fastattn.dropout(torch.zeros(1, 1, device=device), 0.5),
}
