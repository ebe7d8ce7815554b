"""The loss over the paper's vocabulary beside torch's linear and cross_entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks import limits
from benchmarks.harness import assert_all_agree, peak_extra_bytes
from fastattn import linear_cross_entropy

TOKENS, CLASSES, WIDTH = 4096, 37000, 512


def test_linear_cross_entropy(race):
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = (torch.randn(CLASSES, WIDTH) * 0.02).requires_grad_()
    target = torch.randint(CLASSES, (TOKENS,))

    def ours():
        loss = linear_cross_entropy(hidden, weight, target, label_smoothing=0.1)
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    def peer(wrap):
        @wrap
        def entropy(hidden, weight):
            return F.cross_entropy(F.linear(hidden, weight), target, label_smoothing=0.1)

        def train():
            loss = entropy(hidden, weight)
            return loss, *torch.autograd.grad(loss, (hidden, weight))

        return train

    torchs = peer(lambda f: f)
    names = ("loss", "dhidden", "dweight")
    assert_all_agree(names, ours(), torchs())
    extra = {"ours": peak_extra_bytes(ours), "peer": peak_extra_bytes(torchs)}
    race(
        f"linear_cross_entropy training: T{TOKENS} V{CLASSES} d{WIDTH}",
        ours,
        peer,
        peer_name="torch linear, cross_entropy",
        reach=1.4,
        limit=limits.matmul(3 * 2 * TOKENS * CLASSES * WIDTH) | limits.exps(TOKENS * CLASSES),
        ours_extra_mb=extra["ours"] / 2**20,
        peer_extra_mb=extra["peer"] / 2**20,
        memory_ratio=extra["peer"] / extra["ours"],
        memory_reach=9.0,
    )
