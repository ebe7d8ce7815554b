"""The grids and the choice of kernels of attention, on no device."""

from __future__ import annotations

import pytest
import torch

from fastattn import _cuda as cuda
from fastattn._cuda import catalog
from fastattn.ops.attention import _cuda
from fastattn.ops.attention.reference import AttentionConfig

CONFIG = AttentionConfig(1.0, False, False, -1, -1, 0.0, False, True)


@pytest.fixture
def launches(monkeypatch):
    """(name, grid) of what would have been launched."""
    found = []

    def record(device, kernel, grid, params):
        kernel.check(grid)
        found.append((kernel.name, grid))

    monkeypatch.setattr(cuda, "launch", record)
    return found


def forward_and_backward(query, key, value, cfg=CONFIG, mask=None, needs=(True,) * 4) -> None:
    inputs = (query, key, value, mask, None, torch.tensor([1, 2]))
    output, lse, lse_low, _ = _cuda.fwd(*inputs, cfg)
    _cuda.bwd(output, None, None, *inputs, output, lse, lse_low, cfg, needs)


@pytest.mark.parametrize("shape", [(70000, 1), (1, 70000), (300, 300)], ids=str)
def test_batch_and_heads_are_in_the_first_dimension_of_the_grid(launches, shape):
    x = torch.zeros(1, 1, 1, 1).expand(*shape, 65, 8)
    forward_and_backward(x, x, x)
    blocks = shape[0] * shape[1] * 2
    assert [grid for _, grid in launches] == [(blocks, 1, 1)] * 4


@pytest.mark.parametrize(
    ("dims", "names"),
    [
        ((64, 64), ["forward<float, 64,", "delta<", "grad_query<float, 64,",
                    "grad_key_value<float, 64, 64,"]),
        ((65, 64), ["forward<float, 128,", "delta<", "grad_query<float, 128,",
                    "grad_key_value<float, 128, 0,", "grad_key_value<float, 0, 64,"]),
        ((64, 200), ["forward<float, 256,", "delta<", "grad_query<float, 64,",
                     "grad_key_value<float, 64, 0,", "grad_key_value<float, 0, 256,"]),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_by_head_dimension(launches, dims, names):
    query, key, value = (torch.zeros(1, 2, 5, d) for d in (dims[0], *dims))
    forward_and_backward(query, key, value)
    found = [name for name, _ in launches]
    assert len(found) == len(names)
    assert all(right in name for right, name in zip(names, found, strict=True))


def test_columns_beyond_256_are_blocks_of_their_own(launches):
    x = torch.zeros(1, 2, 5, 512)
    forward_and_backward(x, x, x)
    assert [grid[1] for name, grid in launches] == [2, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("cfg", "mask", "switches"),
    [
        (CONFIG, None, "false, false, false"),
        (CONFIG._replace(is_causal=True), None, "true, false, false"),
        (CONFIG._replace(window_left=3), None, "true, false, false"),
        (CONFIG, torch.zeros(1, 1, 5, 5), "false, true, false"),
        (CONFIG._replace(dropout_p=0.1), None, "false, false, true"),
    ],
    ids=str,
)
def test_switches_by_call(launches, cfg, mask, switches):
    x = torch.zeros(1, 2, 5, 8)
    forward_and_backward(x, x, x, cfg, mask)
    assert all(name.endswith(f"{switches}>") for name, _ in launches if "delta" not in name)


def test_no_kernel_for_a_gradient_that_nobody_needs(launches):
    x = torch.zeros(1, 2, 5, 8)
    forward_and_backward(x, x, x, needs=(False, False, True, False))
    names = [name.removeprefix("fa::attention_").partition(">")[0] for name, _ in launches]
    switches = "false, false, false"
    assert names == [
        f"forward<float, 64, {switches}",
        "delta<float",
        f"grad_key_value<float, 0, 64, {switches}",
    ]


def test_the_default_set_holds_what_training_needs(launches):
    known = {kernel.name for kernel in catalog.kernels(60, ["attention"])}
    x = torch.zeros(2, 4, 65, 64)
    for cfg in (CONFIG, CONFIG._replace(is_causal=True, dropout_p=0.1)):
        forward_and_backward(x, x, x, cfg)
        forward_and_backward(x.half(), x.half(), x.half(), cfg)
    assert len(launches) == 16 and {name for name, _ in launches} <= known
