"""LayerNorm(residual + dropout(x)) beside torch's three ops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks import limits
from benchmarks.harness import assert_agree
from fastattn import add_layer_norm

ROWS, COLUMNS = 4096, 512
CASES = [("inference", 0.0, 1.6), ("training", 0.0, 1.2), ("training", 0.1, 2.5)]
TENSORS_MOVED = {"inference": 3, "training": 8}  # forward x, residual, sum, out; backward the rest


@pytest.mark.parametrize(("mode", "dropout_p", "reach"), CASES)
def test_add_layer_norm(race, mode, dropout_p, reach):
    trains = mode == "training"
    x, residual = (torch.randn(ROWS, COLUMNS, requires_grad=trains) for _ in range(2))
    weight, bias = (torch.randn(COLUMNS, requires_grad=trains) for _ in range(2))
    inputs, grad = (x, residual, weight, bias), torch.randn(ROWS, COLUMNS)

    def run(layer_norm):
        with torch.set_grad_enabled(trains):
            out = layer_norm()
        return torch.autograd.grad(out, inputs, grad) if trains else (out,)

    def ours():
        return run(lambda: add_layer_norm(x, residual, weight, bias, dropout_p=dropout_p))

    def peer():
        def layer_norm():
            dropped = F.dropout(x, dropout_p) if dropout_p else x
            return F.layer_norm(residual + dropped, (COLUMNS,), weight, bias)

        return run(layer_norm)

    def check():
        if dropout_p == 0:
            for name, a, b in zip(("first", "second", "dw", "db"), ours(), peer(), strict=False):
                assert_agree(name, a, b)

    race(
        f"add_layer_norm {mode}: {ROWS}x{COLUMNS} dropout {dropout_p}",
        ours,
        peer,
        peer_name="torch dropout, add, layer_norm",
        reach=reach,
        check=check,
        limit_seconds=TENSORS_MOVED[mode] * x.nbytes / limits.copy_bandwidth(),
        limit_name="copy bandwidth",
    )
