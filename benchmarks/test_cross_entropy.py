"""The loss over the paper's vocabulary beside torch's linear and cross_entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks import limits
from benchmarks.harness import assert_agree, peak_extra_bytes
from fastattn import linear_cross_entropy

TOKENS, CLASSES, WIDTH = 4096, 37000, 512


def test_linear_cross_entropy(race):
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = (torch.randn(CLASSES, WIDTH) * 0.02).requires_grad_()
    target = torch.randint(CLASSES, (TOKENS,))

    def ours():
        loss = linear_cross_entropy(hidden, weight, target, label_smoothing=0.1)
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    def peer():
        loss = F.cross_entropy(F.linear(hidden, weight), target, label_smoothing=0.1)
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    def check():
        for name, a, b in zip(("loss", "dhidden", "dweight"), ours(), peer(), strict=True):
            assert_agree(name, a, b)

    memory = {"ours_extra_mb": peak_extra_bytes(ours) / 2**20}
    memory["peer_extra_mb"] = peak_extra_bytes(peer) / 2**20
    race(
        f"linear_cross_entropy training: T{TOKENS} V{CLASSES} d{WIDTH}, extra memory "
        f"{memory['peer_extra_mb'] / memory['ours_extra_mb']:.1f}x less",
        ours,
        peer,
        peer_name="torch linear, cross_entropy",
        reach=1.4,
        check=check,
        limit_seconds=3 * 2 * TOKENS * CLASSES * WIDTH / limits.matmul_flops(),
        limit_name="matmul rate",
        **memory,
    )
