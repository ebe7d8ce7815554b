"""Dropout beside torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks import limits
from benchmarks.harness import assert_agree
from fastattn import dropout

P = 0.1


@pytest.mark.slow
def test_dropout(race):
    x = torch.randn(4096, 512)

    def check():
        out = dropout(x, P)
        kept = out != 0
        assert_agree("output", out[kept], x[kept] / (1 - P))
        assert abs(kept.float().mean().item() - (1 - P)) < 0.01

    def peer(wrap):
        run = wrap(lambda x: F.dropout(x, P))
        return lambda: run(x)

    race(
        "dropout forward: 4096x512",
        lambda: dropout(x, P),
        peer,
        peer_name="torch dropout",
        reach=None,
        check=check,
        limit=limits.moved(2 * x.nbytes, 2 * x.nbytes),
    )
