"""The random numbers of every dropout: Philox4x32 with 7 rounds (Salmon et al., SC 2011).

This is the readable specification in plain PyTorch; each kernel computes the same bits. A mask is a
pure function of ``rng_state`` and the position of an element, so it is recomputed in the backward
and never stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def draw_rng_state(device: torch.device) -> Tensor:
    """A fresh ``rng_state`` (int64 [2]: seed, offset) from torch's default generator of ``device``.

    Drawn outside the ops, so that ``torch.manual_seed``, activation checkpointing and CUDA graphs
    see it as they see any other random number.
    """
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def philox4x32(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Four 32-bit words (in int64 tensors) for broadcastable words ``counter`` [4], ``key`` [2]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2  # wraps modulo 2^64
        high0, high1 = (product0 >> 32) & _WORD, (product1 >> 32) & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _WORD, high0 ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _WORD, (k1 + _KEY_INCREMENTS[1]) & _WORD
    return [c0, c1, c2, c3]


def keep_mask(
    rng_state: Tensor, dropout_p: float, columns: int, word1: Tensor, word2: Tensor
) -> Tensor:
    """Bool [..., columns]: which elements dropout keeps; ``...`` is the shape of word1 and word2.

    The counter of column j is (j >> 2, word1, word2, offset), its word lane j & 3, and an element
    is kept if that word >= floor(dropout_p * 2^32).
    """
    seed, offset = rng_state[0], rng_state[1] & _WORD
    key = [seed & _WORD, (seed >> 32) & _WORD]
    groups = torch.arange((columns + 3) // 4, dtype=torch.int64, device=rng_state.device)
    counter = [groups, word1.unsqueeze(-1), word2.unsqueeze(-1), offset]
    words = torch.broadcast_tensors(*philox4x32(counter, key))
    lanes = torch.stack(words, dim=-1).flatten(-2)[..., :columns]
    return lanes >= int(dropout_p * 2**32)


def attention_keep_mask(
    rng_state: Tensor, dropout_p: float, shape: torch.Size, first_head: int = 0
) -> Tensor:
    """Bool [B, H, Lq, Lk]; the counter is (j >> 2, i, first_head + b * H + h, offset)."""
    batch, heads, q_len, kv_len = shape
    device = rng_state.device
    query = torch.arange(q_len, dtype=torch.int64, device=device).expand(batch, heads, q_len)
    head = torch.arange(first_head, first_head + batch * heads, dtype=torch.int64, device=device)
    return keep_mask(rng_state, dropout_p, kv_len, query, head.view(batch, heads, 1))


def rowwise_keep_mask(rng_state: Tensor, dropout_p: float, shape: torch.Size) -> Tensor:
    """Bool of ``shape``, a row its last dimension; counter (j >> 2, row, row >> 32, offset)."""
    columns = shape[-1] if shape else 1
    rows = shape[:-1].numel() if shape else 1
    row = torch.arange(rows, dtype=torch.int64, device=rng_state.device)
    return keep_mask(rng_state, dropout_p, columns, row & _WORD, row >> 32).view(shape)


def keep_scale(dropout_p: float) -> float:
    """What kept elements are multiplied with: 1 / (1 - p), and 0 for p = 1, which keeps none."""
    return 0.0 if dropout_p >= 1.0 else 1.0 / (1.0 - dropout_p)
