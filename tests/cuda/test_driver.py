"""The driver part of fastattn._C, on a stub of NVIDIA's driver that notes every call."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from tests.cuda.kernels import FOLDER, ROOT, run_python

STATUS = "from fastattn._cuda import driver; print(driver.why_not())"


@pytest.fixture(scope="module")
def stub(tmp_path_factory) -> str:
    library = tmp_path_factory.mktemp("stub") / "libcuda_stub.so"
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    source = str(FOLDER / "stub_libcuda.c")
    command = [*compiler, "-shared", "-fPIC", "-Wall", "-Werror", source, "-o", str(library)]
    subprocess.run(command, check=True)
    return str(library)


def test_launches(stub, tmp_path):
    """The tests of stub_driver.py, in a process of their own: a driver is found once a process."""
    code = (
        "import sys, pytest\n"
        f"sys.exit(pytest.main([{str(FOLDER / 'stub_driver.py')!r}, '-q', '-p', "
        "'no:cacheprovider', '--rootdir', " + repr(str(ROOT)) + "]))"
    )
    cache = tmp_path / "cache"
    result = run_python(code, FASTATTN_LIBCUDA=stub, FASTATTN_CACHE_DIR=str(cache))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("library", "environment", "reason"),
    [
        ("stub", {"STUB_CUDA_NO_DEVICE": "1"}, "does not start: no CUDA-capable device"),
        ("/nowhere/libcuda.so", {}, "no NVIDIA driver was found (/nowhere/libcuda.so can't be"),
        ("libc.so.6", {}, "NVIDIA's driver lacks cuInit; one for CUDA 12.0 or newer has it"),
    ],
)
def test_why_no_kernel_can_run(stub, library, environment, reason):
    chosen = stub if library == "stub" else library
    result = run_python(STATUS, FASTATTN_LIBCUDA=chosen, **environment)
    assert reason in result.stdout, result.stderr
