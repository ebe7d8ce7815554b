"""Attention on the CPU beside torch's: forward, forward and backward, decode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import limits
from benchmarks.harness import assert_agree
from fastattn import scaled_dot_product_attention

TRANSLATION, BERT, LONG, WIDE = (
    (32, 8, 64, 64),
    (8, 8, 512, 64),
    (1, 16, 2048, 64),
    (1, 8, 4096, 128),
)
FORWARD = [
    (TRANSLATION, {"full": 1.5, "causal": 1.5, "padded": 1.5, "padded+causal": 1.5}),
    (BERT, {"full": 1.25, "causal": 2.0, "padded+causal": 2.0}),
    (LONG, {"full": 1.2, "causal": 1.4, "padded+causal": 1.4}),
    (WIDE, {"full": 1.0, "causal": 1.05}),
]
HALF = [(shape, {"full": 1.7, "causal": 2.0}) for shape in (TRANSLATION, BERT, LONG)]
BACKWARD = [
    (TRANSLATION, 0.0, "full", 2.0),
    (BERT, 0.0, "full", 1.35),
    (BERT, 0.0, "causal", 2.2),
    (LONG, 0.0, "causal", 1.5),
    (TRANSLATION, 0.1, "full", 2.5),
    (BERT, 0.1, "full", 3.5),
    (BERT, 0.1, "causal", 6.0),
    (LONG, 0.1, "causal", 8.0),
]


def _flatten(table):
    return [(shape, mask, reach) for shape, masks in table for mask, reach in masks.items()]


def _padding(batch: int, length: int) -> Tensor:
    """bool [B, L]: up to 40% of a row is padding, a fifth where there is one row."""
    padding = torch.zeros(batch, length, dtype=torch.bool)
    for b in range(batch):
        share = 0.4 * (b * 7 % 10) / 10 if batch > 1 else 0.2
        padding[b, length - int(length * share) :] = True
    return padding


def _masks(mask: str, batch: int, length: int) -> tuple[dict, dict, float]:
    """Keyword arguments of ours and of torch's, and the share of the scores that is visible."""
    ours, torchs, share = {}, {}, 1.0
    if "padded" in mask:
        padding = _padding(batch, length)
        ours["key_padding_mask"] = padding
        torchs["attn_mask"] = ~padding[:, None, None, :]
        share *= 1 - padding.float().mean().item()
    if "causal" in mask:
        ours["is_causal"] = torchs["is_causal"] = True
        share /= 2
    return ours, torchs, share


def _label(op: str, shape: tuple[int, ...], mask: str, dtype: torch.dtype = torch.float32) -> str:
    batch, heads, length, dim = shape
    name = str(dtype).removeprefix("torch.")
    return f"{op}: {name} B{batch} H{heads} S{length} D{dim} {mask}"


def _race_forward(race, shape, mask: str, reach: float, dtype: torch.dtype) -> None:
    batch, heads, length, dim = shape
    query, key, value = (torch.randn(shape).to(dtype) for _ in range(3))
    for_ours, for_torch, share = _masks(mask, batch, length)

    def ours():
        return scaled_dot_product_attention(query, key, value, **for_ours)

    def peer():
        return F.scaled_dot_product_attention(query, key, value, **for_torch)

    with torch.no_grad():
        flops = 4 * batch * heads * length * length * dim * share
        race(
            _label("attention forward", shape, mask, dtype),
            ours,
            peer,
            peer_name="torch SDPA",
            reach=reach,
            check=lambda: assert_agree("output", ours(), peer()),
            limit_seconds=flops / limits.matmul_flops(dtype),
            limit_name="matmul rate",
        )


@pytest.mark.parametrize(("shape", "mask", "reach"), _flatten(FORWARD))
def test_forward(race, shape, mask, reach):
    _race_forward(race, shape, mask, reach, torch.float32)


@pytest.mark.parametrize(("shape", "mask", "reach"), _flatten(HALF))
def test_forward_bfloat16(race, shape, mask, reach):
    _race_forward(race, shape, mask, reach, torch.bfloat16)


@pytest.mark.parametrize(("shape", "dropout_p", "mask", "reach"), BACKWARD)
def test_forward_and_backward(race, shape, dropout_p, mask, reach):
    batch, heads, length, dim = shape
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape)
    causal = mask == "causal"

    def train(attention):
        output = attention(query, key, value, dropout_p=dropout_p, is_causal=causal)
        return torch.autograd.grad(output, (query, key, value), grad)

    def check():
        if dropout_p == 0:
            for name, a, b in zip(
                ("dq", "dk", "dv"),
                train(scaled_dot_product_attention),
                train(F.scaled_dot_product_attention),
                strict=True,
            ):
                assert_agree(name, a, b)

    flops = 14 * batch * heads * length * length * dim * (0.5 if causal else 1.0)
    race(
        _label("attention training", shape, f"{mask} dropout {dropout_p}"),
        lambda: train(scaled_dot_product_attention),
        lambda: train(F.scaled_dot_product_attention),
        peer_name="torch SDPA",
        reach=reach,
        check=check,
        limit_seconds=flops / limits.matmul_flops(),
        limit_name="matmul rate",
    )


@pytest.mark.parametrize("kv_len", [512, 4096])
def test_decode(race, kv_len):
    query = torch.randn(64, 8, 1, 64)
    key, value = (torch.randn(64, 8, kv_len, 64) for _ in range(2))

    def ours():
        return scaled_dot_product_attention(query, key, value)

    def peer():
        return F.scaled_dot_product_attention(query, key, value)

    with torch.no_grad():
        race(
            f"attention decode: float32 B64 H8 D64 kv {kv_len}",
            ours,
            peer,
            peer_name="torch SDPA",
            reach=1.3,
            check=lambda: assert_agree("output", ours(), peer()),
            limit_seconds=2 * key.nbytes / limits.read_bandwidth(),
            limit_name="read bandwidth",
        )
