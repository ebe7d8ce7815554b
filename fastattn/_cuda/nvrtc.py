"""NVIDIA's run-time compiler: finding one that knows an architecture, and compiling with it.

Looked for, in this order: the packages nvidia-cuda-nvrtc* from PyPI (torch's own among them), what
cuda-pathfinder finds (conda, a toolkit), and what the system's loader finds. Of several, the one of
torch's CUDA comes first; a card older than its CUDA needs another, which the extra cuda12 brings.
"""

from __future__ import annotations

import ctypes
import functools
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from fastattn._cuda import headers, sources

INSTALL = "pip install 'fastattn[cuda12]'"
_OPTIONS = ("--std=c++17", "-default-device")
_MAJORS = (12, 13)


class CompileError(RuntimeError):
    """A kernel does not compile, or nothing here can compile it."""


class Compiled(NamedTuple):
    """A cubin, the kernel's name in it, and what the compiler said about it."""

    cubin: bytes
    function: str
    log: str


class Nvrtc:
    """One NVRTC library.

    Attributes:
        path: where it was found.
        version: (major, minor).
        architectures: what it compiles for, 60 for sm_60; ascending.
    """

    def __init__(self, path: str):
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        self.architectures = tuple(sorted(numbers))

    def headers(self) -> Path:
        """The folder of cuda_fp16.h for it.

        Raises:
            CompileError: there is none.
        """
        folder = headers.find("cuda_fp16.h", beside="vector_types.h", major=self.version[0])
        if folder is None:
            package = "nvidia-cuda-runtime" + ("-cu12" if self.version[0] == 12 else "")
            raise CompileError(f"NVIDIA's header cuda_fp16.h was not found: pip install {package}")
        return folder

    def state(self) -> str:
        """What, besides sources, decides about the result: versions and options."""
        version = headers.version(self.headers())
        return f"nvrtc {self.version} headers {version} {' '.join(_OPTIONS)}"

    def compile(self, source: str, name: str, arch: int, *more_options: str) -> Compiled:
        """Compile the kernel ``name`` of csrc/``source`` for sm_``arch``.

        Raises:
            CompileError: with the compiler's messages.
        """
        options = [f"--gpu-architecture=sm_{arch}", *_OPTIONS, *more_options]
        options += [f"-I{sources.root()}", f"-I{self.headers()}"]
        program = ctypes.c_void_p()
        text = f'#include "{source}"\n'.encode()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, b"kernel.cu", 0, None, None)
        try:
            self._call("nvrtcAddNameExpression", program, name.encode())
            result = self._library.nvrtcCompileProgram(
                program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))
            )
            log = self._bytes("nvrtcGetProgramLog", program).rstrip(b"\0").decode()
            if result != 0:
                raise CompileError(f"{name} does not compile for sm_{arch}:\n{log}")
            lowered = ctypes.c_char_p()
            self._call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(lowered))
            assert lowered.value is not None
            return Compiled(self._bytes("nvrtcGetCUBIN", program), lowered.value.decode(), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, getter: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{getter}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(getter, program, content)
        return content.raw

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            words = self._library.nvrtcGetErrorString(result).decode()
            raise CompileError(f"{self.path}: {name} failed: {words}")


@functools.cache
def found() -> tuple[Nvrtc, ...]:
    """Every NVRTC here, the one of torch's CUDA first."""
    libraries: list[Nvrtc] = []
    for path in dict.fromkeys([*_packaged(), *_found_by_pathfinder(), *_known_to_loader()]):
        try:
            library = Nvrtc(path)
        except (OSError, AttributeError, CompileError):
            continue
        if all(library.version != other.version for other in libraries):
            libraries.append(library)
    own = int((torch.version.cuda or "0").split(".")[0])
    return tuple(sorted(libraries, key=lambda library: library.version[0] != own))


def _packaged() -> list[str]:
    spec = find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return [str(p) for place in places for p in sorted(Path(place).glob("*/lib/libnvrtc.so.*"))]


def _found_by_pathfinder() -> list[str]:
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError:
        return []
    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except (DynamicLibNotFoundError, RuntimeError):
        return []
    return [path] if path else []


def _known_to_loader() -> list[str]:
    return [f"libnvrtc.so.{major}" for major in _MAJORS]


def choose(capability: int) -> tuple[Nvrtc, int]:
    """An NVRTC, and the architecture to compile for, to run on a card of ``capability``.

    That is the highest architecture of the card's generation that is no newer than the card.

    Raises:
        CompileError: there is none; says what to install.
    """
    for library in found():
        able = [a for a in library.architectures if a // 10 == capability // 10 and a <= capability]
        if able:
            return library, able[-1]
    if not found():
        raise CompileError(f"no NVRTC, NVIDIA's run-time compiler, was found: {INSTALL}")
    known = "; ".join(f"{describe(library)} knows {spell(library)}" for library in found())
    raise CompileError(f"no NVRTC here compiles for sm_{capability} ({known}): {INSTALL}")


def describe(library: Nvrtc) -> str:
    return "NVRTC {}.{}".format(*library.version)


def spell(library: Nvrtc) -> str:
    return " ".join(f"sm_{arch}" for arch in library.architectures)
