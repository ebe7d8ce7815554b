"""nvcc, where there is one, takes the same sources as NVRTC, and warns of nothing."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from fastattn._cuda import catalog, sources

NVCC = shutil.which("nvcc")


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
