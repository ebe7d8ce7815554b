"""Attention on the CPU beside torch's: forward, forward and backward, decode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import limits
from benchmarks.harness import assert_agree, assert_all_agree
from fastattn import scaled_dot_product_attention, varlen_attention

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
    return f"{op} {name}: B{batch} H{heads} S{length} D{dim} {mask}"


def _limit(shape: tuple[int, ...], share: float, products: int, exps: int, dtype=torch.float32):
    """Of ``products`` matrix products and ``exps`` exponentials for each visible score."""
    batch, heads, length, dim = shape
    scores = batch * heads * length * length * share
    return limits.matmul(2 * products * scores * dim, dtype) | limits.exps(exps * scores)


def _race_forward(race, shape, mask: str, reach: float, dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(shape).to(dtype) for _ in range(3))
    for_ours, for_torch, share = _masks(mask, shape[0], shape[2])

    def ours():
        return scaled_dot_product_attention(query, key, value, **for_ours)

    def peer(wrap):
        attention = wrap(lambda *x: F.scaled_dot_product_attention(*x, **for_torch))
        return lambda: attention(query, key, value)

    with torch.no_grad():
        race(
            _label("attention forward", shape, mask, dtype),
            ours,
            peer,
            peer_name="torch SDPA",
            reach=reach,
            check=lambda: assert_agree("output", ours(), peer(lambda f: f)()),
            limit=_limit(shape, share, products=2, exps=1, dtype=dtype),
        )


@pytest.mark.parametrize(("shape", "mask", "reach"), _flatten(FORWARD))
def test_forward(race, shape, mask, reach):
    _race_forward(race, shape, mask, reach, torch.float32)


@pytest.mark.parametrize(("shape", "mask", "reach"), _flatten(HALF))
def test_forward_bfloat16(race, shape, mask, reach):
    _race_forward(race, shape, mask, reach, torch.bfloat16)


@pytest.mark.parametrize(("shape", "dropout_p", "mask", "reach"), BACKWARD)
def test_forward_and_backward(race, shape, dropout_p, mask, reach):
    _race_training(race, shape, dropout_p, mask, reach)


@pytest.mark.reused_buffers
@pytest.mark.parametrize(
    ("shape", "dropout_p", "mask"), [(shape, p, mask) for shape, p, mask, _ in BACKWARD if p]
)
def test_with_reused_buffers(race, shape, dropout_p, mask):
    """torch's dropout makes matrices that malloc gives back: what is left without page faults."""
    _race_training(race, shape, dropout_p, mask, reach=None)


def _race_training(race, shape, dropout_p: float, mask: str, reach: float | None) -> None:
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape)
    causal = mask == "causal"

    def train(attention, dropout_p=dropout_p):
        output = attention(query, key, value, dropout_p=dropout_p, is_causal=causal)
        return torch.autograd.grad(output, (query, key, value), grad)

    def peer(wrap):
        attention = wrap(lambda *x, **options: F.scaled_dot_product_attention(*x, **options))
        return lambda: train(attention)

    def check():
        without_dropout = (
            train(attention, dropout_p=0.0)
            for attention in (scaled_dot_product_attention, F.scaled_dot_product_attention)
        )
        assert_all_agree(("dq", "dk", "dv"), *without_dropout)

    dropout = f" dropout {dropout_p}" if dropout_p else ""
    race(
        _label(f"attention training{' with dropout' if dropout_p else ''}", shape, mask + dropout),
        lambda: train(scaled_dot_product_attention),
        peer,
        peer_name="torch SDPA",
        reach=reach,
        check=check,
        limit=_limit(shape, 0.5 if causal else 1.0, products=7, exps=2),
    )


def _race_decode(race, kv_len: int, dtype: torch.dtype, reach: float | None) -> None:
    query = torch.randn(64, 8, 1, 64).to(dtype)
    key, value = (torch.randn(64, 8, kv_len, 64).to(dtype) for _ in range(2))

    def ours():
        return scaled_dot_product_attention(query, key, value)

    def peer(wrap):
        attention = wrap(lambda *x: F.scaled_dot_product_attention(*x))
        return lambda: attention(query, key, value)

    with torch.no_grad():
        race(
            f"attention decode {str(dtype).removeprefix('torch.')}: B64 H8 D64 kv {kv_len}",
            ours,
            peer,
            peer_name="torch SDPA",
            reach=reach,
            check=lambda: assert_agree("output", ours(), peer(lambda f: f)()),
            limit=limits.read(2 * key.nbytes, 2 * key.nbytes),
        )


@pytest.mark.parametrize("kv_len", [512, 4096])
def test_decode(race, kv_len):
    _race_decode(race, kv_len, torch.float32, 1.3)


@pytest.mark.slow
@pytest.mark.parametrize("kv_len", [512, 4096])
def test_decode_bfloat16(race, kv_len):
    _race_decode(race, kv_len, torch.bfloat16, None)


@pytest.mark.slow
def test_packed_sentences(race):
    """Beside torch's attention on the same sentences padded."""
    batch, heads, length, dim = BERT
    padding = _padding(batch, length)
    padded = [torch.randn(batch, length, heads, dim) for _ in range(3)]
    packed = [x[~padding] for x in padded]
    ends = (~padding).sum(1).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends]).int()

    def ours():
        return varlen_attention(*packed, offsets, offsets)

    def peer(wrap):
        visible = ~padding[:, None, None, :]
        attention = wrap(lambda *x: F.scaled_dot_product_attention(*x, attn_mask=visible))
        return lambda: attention(*(x.transpose(1, 2) for x in padded))

    def check():
        assert_agree("output", ours(), peer(lambda f: f)().transpose(1, 2)[~padding])

    visible = (~padding).sum(1).float().square().mean().item() / length**2
    with torch.no_grad():
        race(
            _label("varlen_attention forward", BERT, "packed"),
            ours,
            peer,
            peer_name="torch SDPA, padded",
            reach=None,
            check=check,
            limit=_limit(BERT, visible, products=2, exps=1),
        )
