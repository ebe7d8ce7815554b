"""The emulator proves itself: each planted fault is found, and named."""

from __future__ import annotations

import pytest
import torch

from fastattn._cuda.emulator import EmulatorError
from tests.cuda.kernels import run_fault, run_python, sanitized

ORDERS = ("forward", "reverse", "7")
RACE = r"shared-memory race: .* at faults.cuh:\d+ (loads|overwrites) .* by"
NAMED = {
    "missing_barrier": RACE,
    "missing_barrier_before_store": RACE,
    "missing_syncwarp": RACE,
    "two_store": RACE,
    "shared_overrun": "shared-memory overrun: an access outside the array",
    "shared_overrun_plain": r"shared-memory overrun: .* past the end of array 1 \(128 bytes\)",
    "shared_too_small": "shared memory: .* takes 4096 bytes, the launch gave 1088",
    "shared_divided_differently": "shared memory: .* divides it in another way",
    "shared_misaligned": "misaligned access to shared memory",
    "global_misaligned": "misaligned access to global memory",
    "divergent_barrier": "divergent barrier: .* is in __syncthreads at faults.cuh",
    "exited_thread_at_barrier": "divergent barrier: .* exit",
    "barrier_and_collective": "deadlock: .* waits in __syncwarp .* waits in __syncthreads",
    "divergent_collective": "divergent warp collective: .* is in __shfl_.*, another lane",
    "exited_lane": "exited lane: ",
    "lane_outside_mask": "mask mismatch: .* with a mask that lacks it",
    "masks_that_overlap": "(mask mismatch|exited lane): ",
    "source_outside_mask": "mask mismatch: a shuffle from a lane outside the mask",
    "missing_wait": "cp.async not waited for: a load of what it copies",
    "never_waited": "cp.async never waited for",
    "copy_misaligned": "misaligned cp.async source",
}


def expected_sum() -> torch.Tensor:
    x = torch.arange(64, dtype=torch.float32)
    return x.sum() + x.roll(-1)


@pytest.mark.parametrize("order", ORDERS)
def test_a_kernel_without_fault_runs(monkeypatch, order):
    monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
    assert torch.equal(run_fault("none"), expected_sum())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", NAMED)
def test_the_fault_is_named(monkeypatch, fault, order):
    monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
    monkeypatch.setenv("FASTATTN_EMULATOR_ARCH", "800")
    with pytest.raises(EmulatorError, match=f"^{fault}: {NAMED[fault]}"):
        run_fault(fault)


def test_messages_name_thread_and_line():
    with pytest.raises(EmulatorError, match=r"block \(0, 0, 0\) thread 0 at faults.cuh:\d+$"):
        run_fault("shared_misaligned")


@pytest.mark.parametrize("order", ORDERS)
def test_poison_shows_a_missing_barrier_that_no_wrapper_sees(monkeypatch, order):
    monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
    assert run_fault("missing_barrier_plain").isnan().any()


def test_an_instruction_of_a_later_card_is_named(monkeypatch):
    monkeypatch.setenv("FASTATTN_EMULATOR_ARCH", "700")
    with pytest.raises(EmulatorError, match="mma.m16n8k8 needs sm_75"):
        run_fault("tensor_cores_of_a_later_card")


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("global_overrun", "heap-buffer-overflow"),
        ("shared_overrun_plain", "use-after-poison"),
        ("global_misaligned_plain", "access within misaligned address"),
    ],
)
def test_sanitizers_find_the_fault(fault, found):
    result = sanitized(f"from tests.cuda.kernels import run_fault\nrun_fault({fault!r})")
    assert result.returncode != 0
    assert found in result.stderr and "faults.cuh" in result.stderr


def test_sanitizers_find_nothing_in_a_kernel_without_fault():
    result = sanitized("from tests.cuda.kernels import run_fault\nprint(run_fault('none').sum())")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(expected_sum().sum())


def test_fibers_of_other_machines():
    """Machines other than x86-64 switch fibers by ucontext."""
    code = "from tests.cuda.kernels import run_fault\nprint(run_fault('none').sum())"
    result = run_python(code, CXX="c++ -DFASTATTN_EMULATOR_UCONTEXT")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(expected_sum().sum())
