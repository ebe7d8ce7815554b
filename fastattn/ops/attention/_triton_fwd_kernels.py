"""output = dropout(softmax(scale Q K^T + mask)) V, tile by tile (Dao 2023; Rabe, Staats 2021).

One block owns BLOCK_M queries of one head and walks along the keys, keeping the running maximum
and sum of each row; with SPLITS > 1 it walks along a part of them, and a second kernel combines
the parts. Q is read once, K and V once per block of queries; 4 Lq Lk D flops per head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn._triton.philox import keep_mask
from fastattn.ops.attention._triton_common_kernels import (
    ANY_VALUE,
    LOG2E,
    head_base,
    hide,
    key_range,
    load_padding,
    load_tile,
    load_visible_tile,
    sequence,
    shares,
    store_tile,
    unpadded_range,
)


@triton.jit(do_not_specialize=ANY_VALUE)
def _attention_fwd_kernel(
    q,  # [B, Hq, Lq, DK], or packed [T, Hq, DK]; so k, v and output
    k,  # [B, Hk, Lk, DK]
    v,  # [B, Hk, Lk, DV]
    mask,  # [B, Hq, Lq, Lk] by strides: uint8 or floating
    padding,  # uint8 [B, Lk]: 1 is padding
    rng_state,  # int64 [2]
    q_ends,  # int32 [B + 1], packed alone
    kv_ends,
    output,  # [B, Hq, Lq, DV]; with SPLITS > 1 [SPLITS, ...] float32, not yet divided
    lse,  # [B, Hq, Lq], or packed [Hq, T]; with SPLITS > 1 [SPLITS, ...]: the maximum
    lse_low,  # as lse; with SPLITS > 1: the sum
    heads, group, q_len, kv_len, tiles,
    q_batch, q_head, q_row,
    k_batch, k_head, k_row,
    v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row,
    padding_batch, padding_column,
    out_batch, out_head, out_row, out_split,
    lse_batch, lse_head, lse_split,
    scale, left, right, last_dropped, keep_scale,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, IS_PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr,
    MASK_COLUMN: tl.constexpr, HAS_PADDING: tl.constexpr, DROPS: tl.constexpr,
    IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    split = program % SPLITS
    tile = tiles - 1 - program // SPLITS % tiles  # under a causal pattern the longest come first
    bh = program // SPLITS // tiles
    b, h = bh // heads, bh % heads
    q_start, q_len = sequence(q_ends, b, q_len, IS_PACKED)
    kv_start, kv_len = sequence(kv_ends, b, kv_len, IS_PACKED)
    first = tile * BLOCK_M
    if first >= q_len:
        return
    q = head_base(q, b, h, q_start, q_batch, q_head, q_row)
    k = head_base(k, b, h // group, kv_start, k_batch, k_head, k_row)
    v = head_base(v, b, h // group, kv_start, v_batch, v_head, v_row)
    mask = head_base(mask, b, h, 0, mask_batch, mask_head, 0)
    padding += b.to(tl.int64) * padding_batch
    diagonal = kv_len - q_len if BOTTOM_RIGHT else 0

    low, high = 0, kv_len
    if HAS_PADDING:
        low, high = unpadded_range(padding, padding_column, kv_len, 16 * BLOCK_N)
    begin, whole_begin, whole_end, end = key_range(
        first, q_len, kv_len, diagonal, left, right, low, high, BLOCK_M, BLOCK_N, HAS_LEFT,
        HAS_RIGHT,
    )  # fmt: skip
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), SPLITS) * BLOCK_N
        begin = tl.minimum(begin + split * share, end)
        end = tl.minimum(begin + share, end)
        whole_begin = tl.minimum(tl.maximum(whole_begin, begin), end)
        whole_end = tl.minimum(tl.maximum(whole_end, whole_begin), end)

    q_tile = load_tile(q, first, q_row, q_len, BLOCK_M, DK, BLOCK_DK, True)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if HAS_LEFT:
        acc, total, highest = _walk(
            acc, total, highest, q_tile, k, v, mask, padding, rng_state, begin, whole_begin, first,
            bh, q_len, kv_len, diagonal, left, right, k_row, v_row, mask_row, padding_column, scale,
            last_dropped, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, True, HAS_LEFT, HAS_RIGHT,
            MASK, MASK_COLUMN, HAS_PADDING, DROPS, IS_SCALED, PRECISION,
        )  # fmt: skip
    acc, total, highest = _walk(
        acc, total, highest, q_tile, k, v, mask, padding, rng_state, whole_begin, whole_end, first,
        bh, q_len, kv_len, diagonal, left, right, k_row, v_row, mask_row, padding_column, scale,
        last_dropped, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, False, HAS_LEFT, HAS_RIGHT,
        MASK, MASK_COLUMN, HAS_PADDING, DROPS, IS_SCALED, PRECISION,
    )  # fmt: skip
    acc, total, highest = _walk(
        acc, total, highest, q_tile, k, v, mask, padding, rng_state, whole_end, end, first, bh,
        q_len, kv_len, diagonal, left, right, k_row, v_row, mask_row, padding_column, scale,
        last_dropped, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, MASK,
        MASK_COLUMN, HAS_PADDING, DROPS, IS_SCALED, PRECISION,
    )  # fmt: skip

    if not IS_SCALED:
        highest *= scale
    if DROPS:
        acc *= keep_scale
    output = head_base(output, b, h, q_start, out_batch, out_head, out_row)
    i = first + tl.arange(0, BLOCK_M)
    place = b.to(tl.int64) * lse_batch + h.to(tl.int64) * lse_head + q_start + i
    if SPLITS > 1:
        place += split.to(tl.int64) * lse_split
        output += split.to(tl.int64) * out_split
        tl.store(lse + place, highest, mask=i < q_len)
        tl.store(lse_low + place, total, mask=i < q_len)
    else:
        sums, low_parts = _log_sum_exp(highest, total)
        tl.store(lse + place, sums, mask=i < q_len)
        tl.store(lse_low + place, low_parts, mask=i < q_len)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store_tile(output, first, out_row, q_len, acc, BLOCK_M, DV, BLOCK_DV)


@triton.jit
def _walk(
    acc, total, highest, q_tile, k, v, mask, padding, rng_state, begin, end, first, bh, q_len,
    kv_len, diagonal, left, right, k_row, v_row, mask_row,
    padding_column, scale, last_dropped,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_EDGE: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, MASK_COLUMN: tl.constexpr,
    HAS_PADDING: tl.constexpr, DROPS: tl.constexpr, IS_SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys ``begin`` to ``end``. Unless IS_SCALED, scores stay as Q K^T: the scale, positive then,
    is a factor of the exponent, which saves a product a score."""
    i = first + tl.arange(0, BLOCK_M)
    exponent = LOG2E if IS_SCALED else scale * LOG2E
    for start in range(begin, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        padded = j
        if HAS_PADDING:
            padded = load_padding(padding, start, padding_column, kv_len, BLOCK_N)
            k_tile = load_visible_tile(k, start, k_row, padded, kv_len, BLOCK_N, DK, BLOCK_DK)
            v_tile = load_visible_tile(v, start, v_row, padded, kv_len, BLOCK_N, DV, BLOCK_DV)
        else:
            k_tile = load_tile(k, start, k_row, kv_len, BLOCK_N, DK, BLOCK_DK, IS_EDGE)
            v_tile = load_tile(v, start, v_row, kv_len, BLOCK_N, DV, BLOCK_DV, IS_EDGE)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if IS_SCALED:
            scores *= scale
        scores = hide(
            scores, i[:, None], j[None, :], q_len, kv_len, diagonal, left, right, mask, mask_row,
            padded[None, :], IS_EDGE, HAS_LEFT, HAS_RIGHT, MASK, MASK_COLUMN, HAS_PADDING,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2((scores - safe[:, None]) * exponent)
        fade = tl.exp2((highest - safe) * exponent)
        total = total * fade + tl.sum(p, 1)
        if DROPS:
            keep = keep_mask(
                rng_state, start, i, tl.full([BLOCK_M], 0, tl.int32) + bh, last_dropped, BLOCK_N
            )
            p = tl.where(keep, p, 0.0)
        acc = acc * fade[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        highest = higher
    return acc, total, highest


@triton.jit
def _log_sum_exp(highest, total):
    """(highest + log total, what rounding took from it); (-inf, 0) where nothing was seen."""
    log_total = tl.log(total)
    sums = highest + log_total
    rest = (highest - sums) + log_total
    empty = total == 0.0
    return tl.where(empty, -float("inf"), sums), tl.where(empty, 0.0, rest)


@triton.jit
def _attention_combine_kernel(
    parts,  # float32 [SPLITS, rows, DV]: sums of exp(score - highest) V
    highests,  # [SPLITS, rows]
    totals,  # [SPLITS, rows]
    output,  # [B, Hq, Lq, DV]
    lse,  # [rows]: [B, Hq, Lq] in order
    lse_low,
    rows, heads, q_len, out_batch, out_head, out_row,
    SPLITS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = row < rows
    wide = row.to(tl.int64)
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        found = tl.load(highests + split * rows + wide, mask=alive, other=-float("inf"))
        highest = tl.maximum(highest, found)
    safe = tl.where(highest == -float("inf"), 0.0, highest)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    column = tl.arange(0, BLOCK_DV)
    inside = alive[:, None] & (column < DV)[None, :]
    for split in tl.static_range(SPLITS):
        found = tl.load(highests + split * rows + wide, mask=alive, other=-float("inf"))
        fade = tl.exp2((found - safe) * LOG2E)
        total += fade * tl.load(totals + split * rows + wide, mask=alive, other=0.0)
        places = (split * rows + wide)[:, None] * DV + column[None, :]
        acc += fade[:, None] * tl.load(parts + places, mask=inside, other=0.0)
    sums, low_parts = _log_sum_exp(highest, total)
    tl.store(lse + wide, sums, mask=alive)
    tl.store(lse_low + wide, low_parts, mask=alive)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    b, h, i = wide // q_len // heads, wide // q_len % heads, wide % q_len
    places = (b * out_batch + h * out_head + i * out_row)[:, None] + column[None, :]
    tl.store(output + places, acc.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=ANY_VALUE)
def _attention_weights_kernel(
    q, k, mask, padding, rng_state,  # as the forward's
    lse,  # [B, Hq, Lq]
    lse_low,
    weights,  # [B, Hq, Lq, Lk], contiguous
    heads, group, q_len, kv_len, tiles,
    q_batch, q_head, q_row,
    k_batch, k_head, k_row,
    mask_batch, mask_head, mask_row,
    padding_batch, padding_column,
    scale, left, right, last_dropped, keep_scale,
    DK: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr,
    MASK_COLUMN: tl.constexpr, HAS_PADDING: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights themselves, by a second pass over the scores: one block owns one tile of them."""
    program = tl.program_id(0)
    along = tl.cdiv(kv_len, BLOCK_N)
    start = program % along * BLOCK_N
    first = program // along % tiles * BLOCK_M
    bh = program // along // tiles
    b, h = bh // heads, bh % heads
    q = head_base(q, b, h, 0, q_batch, q_head, q_row)
    k = head_base(k, b, h // group, 0, k_batch, k_head, k_row)
    mask = head_base(mask, b, h, 0, mask_batch, mask_head, 0)
    diagonal = kv_len - q_len if BOTTOM_RIGHT else 0
    i = first + tl.arange(0, BLOCK_M)
    j = start + tl.arange(0, BLOCK_N)
    padded = j
    q_tile = load_tile(q, first, q_row, q_len, BLOCK_M, DK, BLOCK_DK, True)
    if HAS_PADDING:
        padding += b.to(tl.int64) * padding_batch
        padded = load_padding(padding, start, padding_column, kv_len, BLOCK_N)
        k_tile = load_visible_tile(k, start, k_row, padded, kv_len, BLOCK_N, DK, BLOCK_DK)
    else:
        k_tile = load_tile(k, start, k_row, kv_len, BLOCK_N, DK, BLOCK_DK, True)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
    scores = hide(
        scores, i[:, None], j[None, :], q_len, kv_len, diagonal, left, right, mask, mask_row,
        padded[None, :], True, HAS_LEFT, HAS_RIGHT, MASK, MASK_COLUMN, HAS_PADDING,
    )  # fmt: skip
    row = bh.to(tl.int64) * q_len + i
    high = tl.load(lse + row, mask=i < q_len, other=0.0)
    rest = tl.load(lse_low + row, mask=i < q_len, other=0.0)
    p = shares(scores, high[:, None], rest[:, None])
    if DROPS:
        heads_of_rows = tl.full([BLOCK_M], 0, tl.int32) + bh
        keep = keep_mask(rng_state, start, i, heads_of_rows, last_dropped, BLOCK_N)
        p = tl.where(keep, p * keep_scale, 0.0)
    inside = (i < q_len)[:, None] & (j < kv_len)[None, :]
    places = row[:, None] * kv_len + j[None, :]
    tl.store(weights + places, p.to(weights.dtype.element_ty), mask=inside)
