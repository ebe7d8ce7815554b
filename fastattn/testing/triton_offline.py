"""Triton kernels compiled for GPUs that are not there: what a launch becomes, and what it costs.

``recorded`` runs a backend's host on meta tensors and keeps its launches; ``compile_launch`` makes
the machine code of one and reads registers, memory and instructions from it. Neither needs a GPU
or a driver. Not under TRITON_INTERPRET=1, where kernels are not compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastattn import _triton
from fastattn._triton.configs import Config

# Bytes of shared memory that a block may ask for, by the vendors' tables.
SHARED_LIMITS = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


class Launch(NamedTuple):
    kernel: Any
    config: Config
    args: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__.strip("_")


class Compiled(NamedTuple):
    """``registers`` a thread; ``spilled``: bytes of stack or local memory a thread;
    ``shared``: bytes a block; ``tensor``: tensor-core instructions by their name."""

    name: str
    arch: str
    registers: int
    spilled: int
    shared: int
    warps: int
    tensor: dict[str, int]


@contextmanager
def recorded(arch: str) -> Iterator[list[Launch]]:
    """Launches made in the block, none of them run, in the configurations for ``arch``."""
    launches: list[Launch] = []

    def keep(kernel: Any, programs: int, config: Config, *args: Any, **constants: Any) -> None:
        if programs:
            launches.append(Launch(kernel, config, args, constants))

    before = _triton.launch, _triton.arch
    _triton.launch, _triton.arch = keep, lambda x: arch
    try:
        yield launches
    finally:
        _triton.launch, _triton.arch = before


def key(launch: Launch) -> tuple:
    """What two launches share if and only if Triton compiles once for both."""
    signature, constants, aligned = _specialise(launch)
    options = launch.config.num_warps, launch.config.num_stages
    return launch.name, tuple(signature.items()), tuple(constants.items()), aligned, options


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[str, Any], tuple[int, ...]]:
    """(types, constants, arguments known to be multiples of 16), by Triton's rules for a call."""
    signature, constants, aligned = {}, dict(launch.constants), []
    given = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
    for place, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            continue
        value, varies = given[name], parameter.do_not_specialize
        if value is None or (not varies and type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(place)
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if not varies and value % 16 == 0:
                aligned.append(place)
    return signature, constants, tuple(aligned)


def target_of(arch: str) -> GPUTarget:
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def compile_launch(launch: Launch, arch: str) -> Compiled:
    """Machine code for ``arch``; raises what Triton or its assembler raise."""
    signature, constants, aligned = _specialise(launch)
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": launch.config.num_warps,
        "num_stages": launch.config.num_stages,
        "enable_fp_fusion": True,
    }
    built = triton.compile(source, target=target_of(arch), options=options)
    read = _read_amd if arch.startswith("gfx") else _read_nvidia
    registers, spilled, tensor = read(built)
    return Compiled(
        launch.name, arch, registers, spilled, built.metadata.shared, launch.config.num_warps,
        tensor,
    )  # fmt: skip


def _read_nvidia(built: Any) -> tuple[int, int, dict[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(built.asm["cubin"])
        usage = _run(_tool("cuobjdump"), "-res-usage", str(path))
        code = _run(_tool("nvdisasm"), "-c", str(path))
    found = {word: int(n) for word, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    tensor = _count(code, r"\b(HGMMA|HMMA|QGMMA|IMMA|DMMA|UTCHMMA|UTCQMMA)\b")
    return found["REG"], found["STACK"] + found["LOCAL"], tensor


def _read_amd(built: Any) -> tuple[int, int, dict[str, int]]:
    code = built.asm["amdgcn"]
    found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", code))
    registers, stack = found["vgpr_count"], found["private_segment_fixed_size"]
    return int(registers), int(stack), _count(code, r"\bv_(mfma|wmma)_")


def _count(code: str, pattern: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in re.findall(pattern, code):
        counts[word] = counts.get(word, 0) + 1
    return counts


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
