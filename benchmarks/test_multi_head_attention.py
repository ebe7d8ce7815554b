"""The whole module beside torch's, in training."""

from __future__ import annotations

import pytest
import torch

import fastattn
from benchmarks import limits
from benchmarks.harness import assert_agree

BATCH, LENGTH, WIDTH, HEADS = 32, 64, 512, 8


@pytest.mark.parametrize(("need_weights", "reach"), [(True, 1.3), (False, 1.15)])
def test_training(race, need_weights, reach):
    modules = {}
    for name, kind in (
        ("ours", fastattn.MultiHeadAttention),
        ("peer", torch.nn.MultiheadAttention),
    ):
        torch.manual_seed(0)
        modules[name] = kind(WIDTH, HEADS, dropout=0.1, batch_first=True)
    x, grad = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)

    def train(module, call):
        module.zero_grad(set_to_none=True)
        output, _ = call(x, x, x, need_weights=need_weights)
        output.backward(grad)

    def peer(wrap):
        call = wrap(modules["peer"])
        return lambda: train(modules["peer"], call)

    def check():
        outputs = [module.eval()(x, x, x)[0] for module in modules.values()]
        assert_agree("output", *outputs)
        for module in modules.values():
            module.train()

    tokens = BATCH * LENGTH
    flops = 6 * tokens * 4 * WIDTH * WIDTH + 14 * tokens * LENGTH * WIDTH
    race(
        f"MultiHeadAttention training: B{BATCH} S{LENGTH} E{WIDTH} H{HEADS} dropout 0.1"
        + (", weights returned" if need_weights else ", need_weights=False"),
        lambda: train(modules["ours"], modules["ours"]),
        peer,
        peer_name="torch.nn.MultiheadAttention",
        reach=reach,
        check=check,
        limit=limits.matmul(flops) | limits.exps(tokens * HEADS * LENGTH),
    )
