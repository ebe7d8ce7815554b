"""Philox4x32 in NumPy (Salmon et al. 2011, section 3.4), apart from ``fastattn._philox``.

uint64 products of uint32 words: the answer that every backend's dropout must equal bit for bit.
Needs NumPy (the ``test`` extra).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def philox4x32(counter: np.ndarray, key: tuple[int, int], rounds: int = 7) -> np.ndarray:
    """uint32 [..., 4] for uint32 counters [..., 4] and a key of two 32-bit words."""
    c = [counter[..., word].astype(np.uint32) for word in range(4)]
    for done in range(rounds):
        k0 = np.uint32((key[0] + done * _W0) % 2**32)
        k1 = np.uint32((key[1] + done * _W1) % 2**32)
        first, second = c[0].astype(np.uint64) * _M0, c[2].astype(np.uint64) * _M1
        c = [_high(second) ^ c[1] ^ k0, _low(second), _high(first) ^ c[3] ^ k1, _low(first)]
    return np.stack(c, axis=-1)


def attention_keep(
    rng_state: Tensor, p: float, shape: tuple[int, ...], first_head: int = 0
) -> Tensor:
    """Bool [B, H, Lq, Lk]; (b, h, i, j) has the counter (j >> 2, i, first_head + b H + h)."""
    batch, heads, q_len, kv_len = shape
    group, query, head = np.meshgrid(
        np.arange((kv_len + 3) // 4),
        np.arange(q_len),
        first_head + np.arange(batch * heads),
        indexing="ij",
    )
    words = _words(rng_state, group, query, head)  # [groups, Lq, B H, 4]
    lanes = words.transpose(2, 1, 0, 3).reshape(batch * heads * q_len, 4 * group.shape[0])
    return _kept(lanes[:, :kv_len], p).reshape(shape)


def rowwise_keep(rng_state: Tensor, p: float, shape: tuple[int, ...], first_row: int = 0) -> Tensor:
    """Bool ``shape``; element (row, col) has counter (col >> 2, row, row >> 32)."""
    columns = shape[-1] if shape else 1
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    group, row = np.meshgrid(
        np.arange((columns + 3) // 4), first_row + np.arange(rows), indexing="ij"
    )
    words = _words(rng_state, group, row & 0xFFFFFFFF, row >> 32)  # [groups, rows, 4]
    lanes = words.transpose(1, 0, 2).reshape(rows, 4 * group.shape[0])
    return _kept(lanes[:, :columns], p).reshape(shape)


def _words(rng_state: Tensor, c0: np.ndarray, c1: np.ndarray, c2: np.ndarray) -> np.ndarray:
    seed, offset = (int(word) % 2**64 for word in rng_state.tolist())
    c3 = np.full_like(c0, offset % 2**32)
    return philox4x32(np.stack([c0, c1, c2, c3], axis=-1), (seed % 2**32, seed >> 32))


def _kept(lanes: np.ndarray, p: float) -> Tensor:
    return torch.from_numpy(lanes.astype(np.int64) >= int(np.floor(p * 2.0**32)))


def _high(product: np.ndarray) -> np.ndarray:
    return (product >> np.uint64(32)).astype(np.uint32)


def _low(product: np.ndarray) -> np.ndarray:
    return (product & np.uint64(0xFFFFFFFF)).astype(np.uint32)
