"""What the driver is told by a launch; test_driver.py runs these tests in a process with a stub."""

from __future__ import annotations

import ctypes
import os
import re
import time

import pytest
import torch

from fastattn import _native
from fastattn._cuda import Kernel, driver
from fastattn.ops.dropout import _cuda as dropout

KERNEL = Kernel("dropout/dropout.cuh", "fa::dropout_forward<float>", 256)
SIZE = 48
PARAMS = bytes(range(SIZE))


@pytest.fixture
def stub():
    library = ctypes.CDLL(os.environ["FASTATTN_LIBCUDA"])
    library.stub_calls.restype = ctypes.c_char_p
    library.stub_context.restype = ctypes.c_size_t
    library.stub_set_params_size(SIZE)
    library.stub_fail(b"", 0)
    library.stub_set_capturing(0)
    library.stub_calls()
    driver._loaded.clear()
    driver._by_function.clear()
    yield library
    library.stub_fail(b"", 0)
    library.stub_set_context(0)


def calls(stub) -> list[str]:
    return stub.stub_calls().decode().splitlines()


def test_a_launch_passes_everything_on(stub):
    driver.launch(0, 0x5712EA, KERNEL._replace(shared=1024), (5, 6, 7), PARAMS)
    said = calls(stub)
    assert said[-2] == (
        "cuLaunchKernel grid=5,6,7 block=256,1,1 shared=1024 stream=5712ea context=c0 extra=0 "
        f"params={PARAMS.hex()}"
    )
    assert "cuLibraryLoadData sm_60" in said
    (name,) = [s for s in said if s.startswith("cuLibraryGetKernel")]
    assert re.search("_ZN2fa15dropout_forwardIfE", name)
    assert not any(s.startswith("cuFuncSetAttribute") for s in said)


def test_a_second_launch_only_launches(stub):
    stub.stub_set_context(0xC0)
    driver.launch(0, 0, KERNEL, (1, 1, 1), PARAMS)
    calls(stub)
    driver.launch(0, 0, KERNEL, (1, 1, 1), PARAMS)
    assert [s.split()[0] for s in calls(stub)] == ["cuLaunchKernel"]


def test_each_device_has_its_own_cubin_and_context(stub):
    driver.launch(0, 0, KERNEL, (1, 1, 1), PARAMS)
    calls(stub)
    driver.launch(1, 0, KERNEL, (1, 1, 1), PARAMS)
    said = calls(stub)
    assert "cuLibraryLoadData sm_75" in said
    assert "cuKernelGetFunction context=c1" in said
    assert any("context=c1 extra" in s for s in said)


def test_the_callers_context_is_as_before(stub):
    stub.stub_set_context(0)
    driver.launch(1, 0, KERNEL, (1, 1, 1), PARAMS)
    assert calls(stub)[-1] == "pop" and stub.stub_context() == 0
    stub.stub_set_context(0xC1)
    driver.launch(1, 0, KERNEL, (1, 1, 1), PARAMS)
    said = calls(stub)
    assert "pop" not in said and stub.stub_context() == 0xC1


def test_more_shared_memory_than_48_kb_is_asked_for_once(stub):
    large = KERNEL._replace(shared=60 << 10)
    for _ in range(2):
        driver.launch(1, 0, large, (1, 1, 1), PARAMS)
    assert calls(stub).count("cuFuncSetAttribute 8=61440") == 1


def test_more_shared_memory_than_the_device_has_is_named(stub):
    with pytest.raises(RuntimeError, match="dropout_forward<float> needs 61440 bytes of shared mem"
                                           ".*device 0 has 49152"):  # fmt: skip
        driver.launch(0, 0, KERNEL._replace(shared=60 << 10), (1, 1, 1), PARAMS)
    assert not any(s.startswith("cuLaunchKernel") for s in calls(stub))


@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuLaunchKernel"])
def test_failures_name_kernel_call_and_reason(stub, call):
    stub.stub_fail(call.encode(), 2)
    with pytest.raises(
        RuntimeError, match=f"fa::dropout_forward<float>: {call} failed: out of memory"
    ):
        driver.launch(0, 0, KERNEL, (1, 1, 1), PARAMS)
    stub.stub_fail(call.encode(), 77)
    with pytest.raises(RuntimeError, match=f"{call} failed: error 77"):
        driver.launch(0, 0, KERNEL, (1, 1, 1), PARAMS)


def test_nothing_is_compiled_while_a_graph_is_captured(stub):
    stub.stub_set_capturing(1)
    with pytest.raises(RuntimeError, match=r"fa::dropout_forward<float> is not compiled and loaded"
                                           r".*CUDA graph.*fastattn.warmup\(\)"):  # fmt: skip
        driver.launch(0, 0, KERNEL, (1, 1, 1), PARAMS)
    assert not any("cuLibrary" in s for s in calls(stub))


def test_loaded_kernels_launch_while_a_graph_is_captured(stub):
    driver.load(0, KERNEL)
    stub.stub_set_capturing(1)
    driver.launch(0, 0, KERNEL, (1, 1, 1), PARAMS)
    assert any(s.startswith("cuLaunchKernel") for s in calls(stub))


def test_warmup_loads_the_default_set(stub):
    import fastattn

    assert fastattn.warmup(0, ops=["dropout"]) == 3
    assert sum(s.startswith("cuLibraryLoadData sm_60") for s in calls(stub)) == 3
    with pytest.raises(ValueError, match="'nonsense' has no CUDA kernels; accepted are .*dropout"):
        fastattn.warmup(0, ops=["nonsense"])


def test_the_status_of_devices(stub):
    lib = _native.lib()
    assert driver.why_not() is None and driver.why_not_on(1) is None
    assert (lib.driver_version(), lib.driver_device_count()) == (12090, 2)
    assert [driver.capability(i) for i in range(2)] == [60, 75]


def test_an_op_packs_its_arguments(stub, monkeypatch):
    """The dropout op, made to believe that its CPU tensors lie on a GPU."""
    launched = []
    monkeypatch.setattr(
        dropout._cuda, "launch",
        lambda device, kernel, grid, params: launched.append((kernel, grid, params)),
    )  # fmt: skip
    x, rng = torch.ones(3, 1001), torch.tensor([1, 2])
    out = dropout.fwd(x, rng, 0.25)
    ((kernel, grid, params),) = launched
    driver.launch(0, 0, kernel, grid, params)
    (said,) = [s for s in calls(stub) if s.startswith("cuLaunchKernel")]
    assert "grid=3,1,1 block=256,1,1" in said
    words = [t.data_ptr() for t in (x, out, rng)]
    packed = b"".join(w.to_bytes(8, "little") for w in words) + (2**30).to_bytes(4, "little")
    packed += memoryview(torch.tensor([4 / 3]).numpy()).tobytes()
    packed += (3).to_bytes(8, "little") + (1001).to_bytes(8, "little")
    assert said.endswith(f"params={packed.hex()}")


def test_a_launch_is_cheap(stub):
    stub.stub_set_context(0xC0)
    driver.launch(0, 0, KERNEL, (1, 1, 1), PARAMS)
    best = float("inf")
    for _ in range(20):
        stub.stub_calls()
        began = time.perf_counter()
        for _ in range(50):
            driver.launch(0, 0, KERNEL, (1, 1, 1), PARAMS)
        best = min(best, (time.perf_counter() - began) / 50)
    assert best < 100e-6, f"{best * 1e6:.1f} us"
    print(f"a launch takes {best * 1e6:.1f} us with the stub")
