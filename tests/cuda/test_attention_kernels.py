"""Attention's CUDA kernels from outside: a module that trains on them, and orders of threads."""

from __future__ import annotations

import pytest
import torch

import fastattn
from fastattn import use_backend
from fastattn.testing import Inputs, emulator_launches
from tests.ops import attention_cases as matrix


def train(backend: str, causal: bool) -> tuple[list[float], list[torch.Tensor]]:
    """(losses, parameters) of three steps with padding and dropout."""
    torch.manual_seed(0)
    module = fastattn.nn.MultiHeadAttention(32, 2, dropout=0.2, batch_first=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    inputs = Inputs()
    x, target = inputs.normal(2, 11, 32), inputs.normal(2, 11, 32)
    padding = torch.arange(11) >= torch.tensor([[11], [7]])
    losses = []
    with use_backend(backend):
        for _ in range(3):
            out, _ = module(
                x, x, x, key_padding_mask=padding, is_causal=causal, need_weights=not causal
            )
            loss = ((out - target) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, list(module.parameters())


@pytest.mark.parametrize("causal", [False, True])
def test_a_module_trains_on_the_kernels(causal):
    before = emulator_launches().total()
    losses, parameters = train("emulator", causal)
    assert emulator_launches().total() > before
    right, exact = train("reference", causal)
    assert losses == pytest.approx(right, rel=1e-5) and losses[-1] < losses[0]
    for one, other in zip(parameters, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("order", ["reverse", "7"])
@pytest.mark.parametrize("pattern", ["full", "causal"])
def test_the_order_of_threads_changes_nothing(monkeypatch, order, pattern):
    monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
    matrix.run_case(
        {
            **matrix.DEFAULTS,
            "shape": matrix.Shape(1, 2, 1, 65, 70, 40, 64),
            "pattern": pattern,
            "padding": "bool",
            "mask": "float" if pattern == "full" else "none",
            "outputs": ("output", "lse", "weights"),
            "dropout_p": 0.3,
        },
        "emulator",
    )
