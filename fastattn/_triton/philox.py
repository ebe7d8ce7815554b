"""Philox4x32 with 7 rounds in Triton: the masks of ``fastattn._philox``, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)
MULTIPLIER_0 = tl.constexpr(0xD2511F53)
MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
INCREMENT_0 = tl.constexpr(0x9E3779B9)
INCREMENT_1 = tl.constexpr(0xBB67AE85)


@triton.jit
def keep_mask(
    rng_state,  # int64 [2]: seed, offset
    first_column,  # a multiple of 4
    word1,  # [M]: row or query index
    word2,  # [M]: 0, or batch and head
    last_dropped,  # int32: the bits of floor(p 2^32) - 1
    COLUMNS: tl.constexpr,  # at least 4
):
    """int1 [M, COLUMNS]: which elements are kept. One Philox call serves four columns."""
    seed, offset = tl.load(rng_state), tl.load(rng_state + 1)
    groups = first_column // 4 + tl.arange(0, COLUMNS // 4)
    w0, w1, w2, w3 = _philox4x32(
        groups[None, :].to(tl.uint32),
        word1[:, None].to(tl.uint32),
        word2[:, None].to(tl.uint32),
        offset.to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    limit = last_dropped.to(tl.uint32, bitcast=True)
    even = tl.join((w0 > limit).to(tl.int8), (w2 > limit).to(tl.int8))
    odd = tl.join((w1 > limit).to(tl.int8), (w3 > limit).to(tl.int8))
    # [M, groups, upper bit of the lane, lower bit]
    return tl.reshape(tl.join(even, odd), [word1.shape[0], COLUMNS]) != 0


@triton.jit
def _philox4x32(c0, c1, c2, c3, k0, k1):
    for _ in tl.static_range(ROUNDS):
        high0, high1 = tl.umulhi(c0, MULTIPLIER_0), tl.umulhi(c2, MULTIPLIER_1)
        low0, low1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + INCREMENT_0, k1 + INCREMENT_1
    return c0, c1, c2, c3
