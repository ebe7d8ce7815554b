"""Causal softmax beside torch's masked one."""

from __future__ import annotations

import torch

from benchmarks import limits
from benchmarks.harness import assert_agree
from fastattn import softmax


def test_causal_softmax(race):
    x = torch.randn(256, 512, 512)
    hidden = torch.ones(512, 512, dtype=torch.bool).triu(1)

    def ours():
        return softmax(x, is_causal=True)

    def peer(wrap):
        run = wrap(lambda x: torch.softmax(x.masked_fill(hidden, float("-inf")), -1))
        return lambda: run(x)

    race(
        "softmax causal: 256x512x512",
        ours,
        peer,
        peer_name="torch masked_fill, softmax",
        reach=2.2,
        check=lambda: assert_agree("output", ours(), peer(lambda f: f)()),
        limit=limits.moved(1.5 * x.nbytes, 2 * x.nbytes) | limits.exps(x.numel() / 2),
    )
