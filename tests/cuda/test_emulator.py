"""The emulator as a backend."""

from __future__ import annotations

import pytest
import torch

import fastattn
from fastattn._cuda import Kernel, emulator, launch
from fastattn.testing import emulator_launches

CPU = torch.device("cpu")


def test_it_can_run_here():
    """The test extra brings all it needs: nothing below, nor in any op's tests, may be skipped."""
    assert emulator.why_not() is None


def test_launches_are_counted():
    before = emulator_launches()["fa::dropout_forward<float>"]
    with fastattn.use_backend("emulator"):
        fastattn.dropout(torch.ones(3, 5), 0.5)
    assert emulator_launches()["fa::dropout_forward<float>"] == before + 1


def test_a_wrong_size_of_params_is_named():
    kernel = Kernel("dropout/dropout.cuh", "fa::dropout_forward<float>", 256)
    with pytest.raises(emulator.EmulatorError, match="3 bytes of params, the struct has 48"):
        launch(CPU, kernel, (1, 1, 1), b"123")


@pytest.mark.parametrize(
    ("variable", "accepted"),
    [("FASTATTN_EMULATOR_ARCH", "600, 610, 700"), ("FASTATTN_EMULATOR_ORDER", "forward, reverse")],
)
def test_a_wrong_setting_is_named(monkeypatch, variable, accepted):
    monkeypatch.setenv(variable, "1")
    with (
        fastattn.use_backend("emulator"),
        pytest.raises(ValueError, match=f"{variable} is '1'; accepted are {accepted}"),
    ):
        fastattn.dropout(torch.ones(3), 0.5)


@pytest.mark.parametrize(
    ("kernel", "grid", "message"),
    [
        (Kernel("x", "k", 100), (1, 1, 1), "k: 100 threads a block; accepted are whole warps"),
        (Kernel("x", "k", 2048), (1, 1, 1), "k: 2048 threads a block"),
        (Kernel("x", "k", 32, 1 << 20), (1, 1, 1), "k: 1048576 bytes of shared memory"),
        (Kernel("x", "k", 32), (1, 65536, 1), r"k: grid \(1, 65536, 1\)"),
        (Kernel("x", "k", 32), (0, 1, 1), r"k: grid \(0, 1, 1\)"),
    ],
)
def test_a_launch_beyond_cuda_s_limits_is_refused(kernel, grid, message):
    with pytest.raises(ValueError, match=message):
        launch(CPU, kernel, grid, b"")
