"""The native module: shared OpenMP threads, choice of instruction set, how tensors reach it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from fastattn import _native

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the native kernels are built on Linux only"
)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True
    )


def test_is_available() -> None:
    assert _native.why_not_available() is None
    assert _native.available()
    assert _native.isa() in _native.isas_built()


def test_threads_follow_torch() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            assert _native.max_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_one_openmp_is_mapped() -> None:
    code = """
import torch
from fastattn import _native
from fastattn.ops.softmax import _cpu
torch.set_num_threads(2)
_cpu.fwd(torch.randn(500, 500), None, False, 1.0)
print(*{l.split()[-1] for l in open("/proc/self/maps") if "omp" in l.rsplit("/", 1)[-1]}, sep="\\n")
"""
    mapped = run_python(code).stdout.split()
    assert len(mapped) == 1, mapped


def softmax() -> tuple[torch.Tensor, ...]:
    from fastattn.ops.softmax import _cpu

    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    return (_cpu.fwd(x, None, False, 1.0),)


def cross_entropy() -> tuple[torch.Tensor, ...]:
    from fastattn.ops.cross_entropy import _cpu
    from fastattn.ops.cross_entropy.reference import CrossEntropyConfig

    random = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*size, generator=random) for size in ((150, 24), (700, 24), (700,))
    )
    target = torch.randint(700, (150,), generator=random)
    cfg = CrossEntropyConfig(0.1, False, -100, "mean")
    return _cpu.fwd(hidden, weight, bias, None, target, cfg, (True, True, True))


@pytest.mark.parametrize("run", [softmax, cross_entropy])
def test_results_do_not_depend_on_the_number_of_threads(run) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_runs_in_another_python_thread() -> None:
    from fastattn.ops.softmax import _cpu

    x, results = torch.eye(300), []
    worker = threading.Thread(target=lambda: results.append(_cpu.fwd(x, None, False, 1.0)))
    worker.start()
    worker.join()
    torch.testing.assert_close(results[0], x.softmax(-1))


@pytest.mark.parametrize("isa", _native.isas_built())
def test_isa_can_be_forced(isa: str) -> None:
    result = run_python("from fastattn import _native; print(_native.isa())", FASTATTN_CPU_ISA=isa)
    if result.returncode == 0:
        assert result.stdout.strip() == isa
    else:
        assert f"FASTATTN_CPU_ISA='{isa}' is not supported by this CPU" in result.stderr


@pytest.mark.parametrize("isa", ["avx9", "AVX2", " "])
def test_unknown_isa_is_one_sentence(isa: str) -> None:
    result = run_python("from fastattn import _native; _native.isa()", FASTATTN_CPU_ISA=isa)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ValueError: FASTATTN_CPU_ISA='{isa}' is not built; usable here: ")


@pytest.mark.parametrize("by_table", [True, False], ids=["dlpack", "attributes"])
def test_both_ways_of_reading_tensors(by_table: bool) -> None:
    if by_table and not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no DLPack exchange table")
    code = f"""
import torch
from fastattn import _native
from fastattn.ops.softmax import _cpu
if not {by_table}:
    _native.lib().learn_torch(_native._DTYPE_CODES, None)
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    x = torch.nn.Parameter(torch.arange(24.0).reshape(2, 3, 4).to(dtype).div(8)).transpose(0, 2)
    mask = torch.tensor([[True, False, True]]).T
    want = (x * 0.5).masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num()
    torch.testing.assert_close(_cpu.fwd(x, mask, False, 0.5), want)
try:
    _cpu.fwd(torch.zeros((1,) * 13), None, False, 1.0)
except ValueError as error:
    print(error)
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert "at most 12 dimensions, got 13" in result.stdout
