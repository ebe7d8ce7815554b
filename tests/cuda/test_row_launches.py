"""The grids and the choice of kernels of the ops over rows, on no device."""

from __future__ import annotations

import pytest
import torch

import fastattn
from fastattn import _cuda as cuda
from fastattn import use_backend
from fastattn._cuda import catalog
from fastattn.ops.cross_entropy import _cuda as cross_entropy
from fastattn.ops.cross_entropy.reference import CrossEntropyConfig
from fastattn.ops.layer_norm import _cuda as layer_norm
from fastattn.ops.softmax import _cuda as softmax
from fastattn.testing import emulator_launches

RNG = torch.tensor([1, 2])


@pytest.fixture
def launches(monkeypatch):
    """(name, grid) of what would have been launched."""
    found = []

    def record(device, kernel, grid, params):
        kernel.check(grid)
        found.append((kernel.name, grid))

    monkeypatch.setattr(cuda, "launch", record)
    return found


def normalise(x, residual=None, needs=(True,) * 4) -> None:
    weight = torch.ones(x.shape[-1])
    _, total, mean, rstd = layer_norm.fwd(x, residual, weight, weight, RNG, 0.1, 1e-5, True)
    residual_dtype = None if residual is None else residual.dtype
    layer_norm.bwd(x, None, total, weight, mean, rstd, RNG, 0.1, needs, x.dtype, residual_dtype,
                   weight.dtype)  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "team", "sums"),
    [(1, "32, false", False), (1024, "32, false", False), (1025, "256, false", False),
     (4096, "256, false", False), (4097, "256, true", True)],
)  # fmt: skip
def test_kernels_by_the_length_of_rows(launches, columns, team, sums):
    x = torch.zeros(3, columns)
    normalise(x)
    softmax.bwd(x, softmax.fwd(x, None, False, 1.0), 1.0)
    names = [name.removeprefix("fa::").removesuffix(">") for name, _ in launches]
    assert names == [
        f"layer_norm_forward<float, float, {team}",
        f"layer_norm_backward<float, float, {team}",
        *(["layer_norm_column_sums<float, float"] if sums else []),
        "layer_norm_parameters<256",
        f"softmax_forward<float, {team}",
        f"softmax_backward<float, {team}",
    ]


@pytest.mark.parametrize(("rows", "forward", "parts"), [(1, 1, 1), (9, 3, 3), (400000, 65536, 256)])
def test_blocks_walk_over_many_rows(launches, rows, forward, parts):
    normalise(torch.zeros(1, 1).expand(rows, 1))
    assert [grid[0] for _, grid in launches] == [forward, parts, 1]


def test_no_kernel_for_a_gradient_that_nobody_needs(launches):
    x = torch.zeros(3, 5000)
    normalise(x, needs=(False, False, True, False))
    normalise(x[:, :8], needs=(True, False, False, False))
    names = [name.removeprefix("fa::layer_norm_").partition("<")[0] for name, _ in launches]
    assert names == ["forward", "column_sums", "parameters", "forward", "backward"]


def test_the_default_set_holds_what_training_needs(launches):
    ops = ["add_layer_norm", "softmax", "linear_cross_entropy"]
    known = {kernel.name for kernel in catalog.kernels(60, ops)}
    for dtype in (torch.float32, torch.float16):
        x = torch.zeros(6, 512, dtype=dtype)
        for residual in (None, x, x.float()):
            normalise(x, residual)
        softmax.bwd(x, softmax.fwd(x, None, False, 1.0), 1.0)
        cfg = CrossEntropyConfig(0.1, False, -100, "mean")
        target = torch.zeros(6, dtype=torch.int64)
        cross_entropy.fwd(x, x, None, None, target, cfg, (True, True, False))
    assert len(launches) == 24 and {name for name, _ in launches} <= known
    assert all("bfloat16" not in name for name in known)
    assert any("bfloat16" in kernel.name for kernel in catalog.kernels(80, ops))


def test_the_public_functions_reach_the_kernels():
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = emulator_launches()
    with use_backend("emulator"):
        shares = fastattn.softmax(fastattn.add_layer_norm(x, x))
        fastattn.linear_cross_entropy(shares, x, torch.arange(3)).backward()
    assert emulator_launches() - before == {
        "fa::layer_norm_forward<float, float, 32, false>": 1,
        "fa::layer_norm_backward<float, float, 32, false>": 1,
        "fa::softmax_forward<float, 32, false>": 1,
        "fa::softmax_backward<float, 32, false>": 1,
        "fa::cross_entropy_rows<256>": 1,
    }
