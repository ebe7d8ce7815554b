"""LayerNorm(residual + dropout(x)) beside torch's three ops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks import limits
from benchmarks.harness import assert_all_agree
from fastattn import add_layer_norm

ROWS, COLUMNS = 4096, 512
CASES = [("inference", 0.0, 1.6), ("training", 0.0, 1.2), ("training", 0.1, 2.5)]


@pytest.mark.reused_buffers
@pytest.mark.parametrize(("mode", "dropout_p", "reach"), CASES)
def test_add_layer_norm(race, mode, dropout_p, reach):
    trains = mode == "training"
    x, residual = (torch.randn(ROWS, COLUMNS, requires_grad=trains) for _ in range(2))
    weight, bias = (torch.randn(COLUMNS, requires_grad=trains) for _ in range(2))
    inputs, grad = (x, residual, weight, bias), torch.randn(ROWS, COLUMNS)

    def run(layer_norm, dropout_p):
        with torch.set_grad_enabled(trains):
            out = layer_norm(*inputs, dropout_p=dropout_p)
        return torch.autograd.grad(out, inputs, grad) if trains else (out,)

    def torchs(x, residual, weight, bias, dropout_p):
        dropped = F.dropout(x, dropout_p) if dropout_p else x
        return F.layer_norm(residual + dropped, (COLUMNS,), weight, bias)

    def peer(wrap):
        layer_norm = wrap(torchs)
        return lambda: run(layer_norm, dropout_p)

    names = ("dx", "dresidual", "dweight", "dbias") if trains else ("output",)
    race(
        f"add_layer_norm {mode}: {ROWS}x{COLUMNS}" + (f" dropout {dropout_p}" if dropout_p else ""),
        lambda: run(add_layer_norm, dropout_p),
        peer,
        peer_name="torch dropout, add, layer_norm" if dropout_p else "torch add, layer_norm",
        reach=reach,
        check=lambda: assert_all_agree(names, run(add_layer_norm, 0.0), run(torchs, 0.0)),
        limit=_limit(x.nbytes, trains, dropout_p),
    )


def _limit(nbytes: int, trains: bool, dropout_p: float) -> limits.Limit:
    """Forward: x, residual, output, and for the backward the sum. Backward: gradient, sum, dx, and
    dresidual where dropout makes it another."""
    tensors = 3 if not trains else 8 if dropout_p else 7
    return limits.moved(tensors * nbytes, 4 * nbytes)
