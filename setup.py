"""Builds fastattn._C, the native kernels. All other metadata is in pyproject.toml.

The build needs a C++17 compiler (GCC or Clang) and neither torch nor CUDA. Every
csrc/<op>/<op>_cpu.cpp is compiled once per instruction-set level, csrc/bindings, csrc/common and
csrc/driver once; ninja compiles what changed. Without a compiler, and on macOS and Windows, the
package installs as pure Python.

Environment: CXX, CXXFLAGS, LDFLAGS as usual; FASTATTN_BUILD_ISA=avx512,avx2 builds fewer levels;
MAX_JOBS limits parallel compilations; FASTATTN_SANITIZE=address,undefined builds with these
sanitizers, for `make sanitize`.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

CSRC = Path("csrc")
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mpopcnt"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
ISA_FLAGS = {
    "generic": [],
    "sse42": ["-msse4.2", "-mpopcnt"],
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512bf16": [*AVX512, "-mavx512bf16"],
}
FLAGS = (
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=fast -fno-math-errno "
    "-fno-trapping-math -Wall -Wextra -Wno-ignored-attributes "
    "-Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized"
).split()
# -O1 halves the time to compile; what doesn't recover ends the program at the first finding. A
# memset of no bytes at a null pointer, an empty tensor's, is let pass: C2y allows it.
SANITIZE = (
    "-O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all -fno-sanitize=vptr,nonnull-attribute"
).split()
SANITIZERS = ("address", "undefined")


def chosen_isas() -> list[str]:
    """The instruction-set levels to build, from FASTATTN_BUILD_ISA or by machine; ascending."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    default = "sse42,avx2,avx512,avx512bf16" if is_x86 else "generic"
    chosen = os.environ.get("FASTATTN_BUILD_ISA", default).split(",")
    if unknown := sorted(set(chosen) - set(ISA_FLAGS)):
        raise SystemExit(f"FASTATTN_BUILD_ISA: unknown level {unknown[0]!r}; known: {[*ISA_FLAGS]}")
    return [isa for isa in ISA_FLAGS if isa in chosen]


def chosen_sanitizers() -> list[str]:
    """The names in FASTATTN_SANITIZE."""
    chosen = [name for name in os.environ.get("FASTATTN_SANITIZE", "").split(",") if name]
    if unknown := sorted(set(chosen) - set(SANITIZERS)):
        raise SystemExit(f"FASTATTN_SANITIZE: unknown {unknown[0]!r}; known: {[*SANITIZERS]}")
    return chosen


def find_compiler() -> list[str] | None:
    """The C++ compiler's command, or None where there is none or it can't build the kernels."""
    if not sys.platform.startswith("linux"):
        return None
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    return command if shutil.which(command[0]) else None


def ninja_file(compiler: list[str], isas: list[str], target: str) -> str:
    """The text of build.ninja: one edge per object file and one for the module."""
    import pybind11

    bindings = sorted((CSRC / "bindings").glob("*.cpp"))
    ops = [p.stem for p in bindings if p.stem not in ("module", "tensor_caster")]
    built = " ".join(f"X({isa}, __VA_ARGS__)" for isa in isas)
    flags = [*FLAGS, f"-DFASTATTN_BUILT_ISAS(X, ...)={built}", f"-I{CSRC}"]
    flags += shlex.split(os.environ.get("CXXFLAGS", ""))
    sanitizers = [f"-fsanitize={name}" for name in chosen_sanitizers()]
    if sanitizers:
        flags += [*sanitizers, *SANITIZE]
    # An isolated build finds pybind11 in another folder each time: only the bindings may know it.
    binding_flags = [
        f"-DFASTATTN_BINDINGS(X)={' '.join(f'X({op})' for op in ops)}",
        *(f"-I{p}" for p in (pybind11.get_include(), sysconfig.get_path("include"))),
    ]
    link = ["-shared", *sanitizers, "-ldl", "-pthread", *shlex.split(os.environ.get("LDFLAGS", ""))]

    def quoted(words: list[str]) -> str:
        return shlex.join(words).replace("$", "$$")

    lines = [
        f"cxx = {quoted(compiler)}",
        f"cxxflags = {quoted(flags)}",
        f"bindingflags = {quoted(binding_flags)}",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $cxxflags $moreflags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = $cxx $in {quoted(link)} -o $out",
    ]
    objects = []
    shared = [p for layer in ("common", "driver") for p in sorted((CSRC / layer).glob("*.cpp"))]
    for source in [*bindings, *shared]:
        objects.append(f"$builddir/{source.parent.name}_{source.stem}.o")
        lines.append(f"build {objects[-1]}: compile {source}")
        if source in bindings:
            lines.append("  moreflags = $bindingflags")
    for source in sorted(CSRC.glob("*/*_cpu.cpp")):
        for isa in isas:
            objects.append(f"$builddir/{source.stem}.{isa}.o")
            lines.append(f"build {objects[-1]}: compile {source}")
            lines.append(f"  moreflags = -DFASTATTN_ISA={isa} {quoted(ISA_FLAGS[isa])}")
    lines.append(f"build {target}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


class NinjaBuild(build_ext):
    """Lets ninja build the module, in a folder that later builds find again."""

    def build_extension(self, ext: Extension) -> None:
        isas = chosen_isas()
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        tag = "-".join([sysconfig.get_config_var("SOABI"), *isas, *chosen_sanitizers()])
        folder = Path("build", "ninja", tag)
        folder.mkdir(parents=True, exist_ok=True)
        text = ninja_file(find_compiler(), isas, str(target).replace(" ", "$ "))
        (folder / "build.ninja").write_text(f"builddir = {folder}\n{text}")
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        command = [sys.executable, "-m", "ninja", "-f", str(folder / "build.ninja"), *jobs]
        subprocess.run(command, check=True)


class KernelSources(build_py):
    """Packs the CUDA kernels' sources, which are compiled on first use, as fastattn/csrc."""

    def run(self) -> None:
        super().run()
        for source in () if self.editable_mode else sorted(CSRC.rglob("*.cuh")):
            target = Path(self.build_lib, "fastattn", source)
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))


def native_extensions() -> list[Extension]:
    """fastattn._C, or nothing where it can't be built."""
    if find_compiler() is None:
        print("fastattn: no C++ compiler for Linux found; installing without native kernels")
        return []
    sources = sorted(str(p) for p in CSRC.rglob("*.cpp"))
    headers = sorted(str(p) for p in CSRC.rglob("*.h"))
    return [Extension("fastattn._C", sources, depends=headers)]


setup(
    ext_modules=native_extensions(), cmdclass={"build_ext": NinjaBuild, "build_py": KernelSources}
)
