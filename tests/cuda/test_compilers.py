"""Compilers that users may bring: nvcc for kernels, clang for the emulator; without a warning."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from fastattn._cuda import catalog, sources
from tests.cuda.kernels import run_python

NVCC, CLANG = shutil.which("nvcc"), shutil.which("clang++")


@pytest.mark.skipif(NVCC is None, reason="no nvcc here; NVRTC, which users run, is tested always")
@pytest.mark.slow
@pytest.mark.parametrize("op", catalog.ops())
def test_nvcc_takes_the_sources(tmp_path, op):
    kernels = catalog.kernels(75, [op])
    unit = tmp_path / "kernels.cu"
    includes = "".join(f'#include "{name}"\n' for name in sorted({k.source for k in kernels}))
    unit.write_text(includes + "".join(f"auto k{i} = &{k.name};\n" for i, k in enumerate(kernels)))
    command = [NVCC, "-arch=sm_75", "-std=c++17", "--expt-relaxed-constexpr", "-cubin"]
    command += ["-I", str(sources.root()), "-o", str(tmp_path / "kernels.cubin"), str(unit)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not re.search("warning", result.stderr), result.stderr


@pytest.mark.skipif(CLANG is None, reason="no clang++ here; g++ is tested always")
@pytest.mark.slow
def test_clang_builds_the_emulator():
    code = "from tests.cuda.kernels import run_fault\nprint(run_fault('none').sum().item())"
    result = run_python(code, CXX="clang++")
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) == 64 * 63 * 32 + 63 * 32 and not result.stderr
