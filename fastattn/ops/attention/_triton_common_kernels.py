"""What the forward and the backward kernels of attention share: addresses, visibility, masks.

Letters: i indexes queries and j keys, each within its own sequence; "tile" is BLOCK of either.
A key j is visible to query i if i + diagonal - left <= j <= i + diagonal + right; causal is
right = 0. Tiles that no query of a block sees are skipped, tiles that all see whole go unmasked.
The last dimension of every tensor is dense, a mask's dense or broadcast (MASK_COLUMN 0).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
BOOL_MASK = tl.constexpr(1)
ADDED_MASK = tl.constexpr(2)
# Arguments that are no reason to compile again: a batch's sizes, and what makes no load wider.
ANY_VALUE = [
    *("q_len", "kv_len", "tiles", "left", "right", "last_dropped", "padding_batch"),
    *("lse_batch", "lse_head", "lse_split", "out_split", "delta_batch", "delta_head"),
]


@triton.jit
def sequence(ends, b, length, IS_PACKED: tl.constexpr):
    """(first row, rows) of sequence b: all of its batch entry, or its part of the packed rows."""
    start = 0
    if IS_PACKED:
        start = tl.load(ends + b)
        length = tl.load(ends + b + 1) - start
    return start, length


@triton.jit
def head_base(x, b, h, start, x_batch, x_head, x_row):
    """The address of row ``start`` of one head of x [B, H, L, D] (packed: x_batch is 0)."""
    offset = tl.cast(b, tl.int64) * x_batch + tl.cast(h, tl.int64) * x_head
    return x + offset + tl.cast(start, tl.int64) * x_row


@triton.jit
def load_tile(
    x, first, x_row, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, CHECKS_ROWS: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK] of x [rows, COLUMNS] from row ``first`` on, 0 outside."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    places = x + row.to(tl.int64)[:, None] * x_row + column[None, :]
    if CHECKS_ROWS:
        inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
        return tl.load(places, mask=inside, other=0.0)
    if COLUMNS != BLOCK:
        return tl.load(places, mask=(column < COLUMNS)[None, :], other=0.0)
    return tl.load(places)


@triton.jit
def load_visible_tile(
    x, first, x_row, padded, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``load_tile``; rows that are padding are selected to zero, whatever they hold."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    places = x + row.to(tl.int64)[:, None] * x_row + column[None, :]
    inside = ((row < rows) & (padded == 0))[:, None] & (column < COLUMNS)[None, :]
    return tl.load(places, mask=inside, other=0.0)


@triton.jit
def store_tile(
    x, first, x_row, rows, values, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    places = x + row.to(tl.int64)[:, None] * x_row + column[None, :]
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    tl.store(places, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_padding(padding, first, padding_column, kv_len, BLOCK: tl.constexpr):
    """uint8 [BLOCK]: which keys from ``first`` on are padding; those past the end are."""
    j = first + tl.arange(0, BLOCK)
    return tl.load(padding + j.to(tl.int64) * padding_column, mask=j < kv_len, other=1)


@triton.jit
def unpadded_range(padding, padding_column, kv_len, BLOCK: tl.constexpr):
    """(first key that is no padding, one past the last); (kv_len, 0) if all are padding."""
    low = kv_len
    high = 0
    for first in range(0, kv_len, BLOCK):
        j = first + tl.arange(0, BLOCK)
        seen = load_padding(padding, first, padding_column, kv_len, BLOCK) == 0
        low = tl.minimum(low, tl.min(tl.where(seen, j, kv_len), 0))
        high = tl.maximum(high, tl.max(tl.where(seen, j + 1, 0), 0))
    return low, high


@triton.jit
def key_range(
    first_query, q_len, kv_len, diagonal, left, right, low, high, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """(begin, whole_begin, whole_end, end): the keys that a block of queries has to visit, all of
    it multiples of BLOCK_N; what lies between the inner two all queries of the block see."""
    last_query = tl.minimum(first_query + BLOCK_M, q_len) - 1
    whole_low = 0
    whole_high = kv_len
    if HAS_LEFT:
        low = tl.maximum(low, first_query + diagonal - left)
        whole_low = tl.maximum(0, last_query + diagonal - left)
    if HAS_RIGHT:
        high = tl.minimum(high, last_query + diagonal + right + 1)
        whole_high = tl.minimum(kv_len, first_query + diagonal + right + 1)
    begin = low // BLOCK_N * BLOCK_N
    end = tl.maximum(begin, tl.cdiv(tl.maximum(high, 0), BLOCK_N) * BLOCK_N)
    whole_begin = tl.minimum(tl.maximum(begin, tl.cdiv(whole_low, BLOCK_N) * BLOCK_N), end)
    whole_end = tl.maximum(whole_high, 0) // BLOCK_N * BLOCK_N
    whole_end = tl.minimum(tl.maximum(whole_begin, whole_end), end)
    return begin, whole_begin, whole_end, end


@triton.jit
def query_range(
    first_key, q_len, diagonal, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """(begin, whole_begin, whole_end, end): as ``key_range``, the queries that see a key tile."""
    low = 0
    high = q_len
    whole_low = 0
    whole_high = q_len
    last_key = first_key + BLOCK_N - 1
    if HAS_RIGHT:
        low = tl.maximum(low, first_key - diagonal - right)
        whole_low = tl.maximum(whole_low, last_key - diagonal - right)
    if HAS_LEFT:
        high = tl.minimum(high, last_key - diagonal + left + 1)
        whole_high = tl.minimum(whole_high, first_key - diagonal + left + 1)
    begin = low // BLOCK_M * BLOCK_M
    end = tl.maximum(begin, tl.cdiv(tl.maximum(high, 0), BLOCK_M) * BLOCK_M)
    whole_begin = tl.minimum(tl.maximum(begin, tl.cdiv(whole_low, BLOCK_M) * BLOCK_M), end)
    # no query past the end is seen, so the last tile may count as whole
    whole_end = tl.where(whole_high == q_len, end, tl.maximum(whole_high, 0) // BLOCK_M * BLOCK_M)
    whole_end = tl.minimum(tl.maximum(whole_begin, whole_end), end)
    return begin, whole_begin, whole_end, end


@triton.jit
def hide(
    scores, i, j, q_len, kv_len, diagonal, left, right, mask, mask_row, padded,
    IS_EDGE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr,
    MASK_COLUMN: tl.constexpr, HAS_PADDING: tl.constexpr,
):  # fmt: skip
    """The scores with what ``mask`` adds, -inf where key j is hidden from query i.

    i, j and padded broadcast to the scores, which may lie either way. Without IS_EDGE the pattern
    hides nothing here and no key is past the end.
    """
    if MASK:
        places = mask + i.to(tl.int64) * mask_row + j * MASK_COLUMN
        inside = (i < q_len) & (j < kv_len)
        if MASK == ADDED_MASK:
            scores += tl.load(places, mask=inside, other=0.0).to(tl.float32)
        else:
            scores = tl.where(tl.load(places, mask=inside, other=0) != 0, scores, -float("inf"))
    if IS_EDGE:
        seen = j < kv_len
        if HAS_LEFT:
            seen = seen & (j >= i + diagonal - left)
        if HAS_RIGHT:
            seen = seen & (j <= i + diagonal + right)
        scores = tl.where(seen, scores, -float("inf"))
    if HAS_PADDING:
        scores = tl.where(padded == 0, scores, -float("inf"))
    return scores


@triton.jit
def shares(scores, lse, lse_low):
    """exp(scores - log-sum-exp), the sum in two parts; 0 for a row that sees nothing."""
    lse = tl.where(lse == -float("inf"), 0.0, lse)
    return tl.exp2(((scores - lse) - lse_low) * LOG2E)
