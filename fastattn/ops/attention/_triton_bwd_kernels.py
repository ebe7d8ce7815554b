"""Gradients of attention, P computed again from the saved log-sum-exp (Dao 2023, algorithm 2).

    dP = (dO V^T + dW) keep / (1 - p);  delta = rowsum(dO O) + rowsum(dW W) - dLSE
    dS = P (dP - delta);  dQ = scale dS K;  dK = scale dS^T Q;  dV = (P keep / (1 - p))^T dO

Two passes, neither with atomics, so that runs are bitwise equal: for dQ (and dS, the gradient of a
mask) one block owns BLOCK_M queries and walks along the keys, for dK and dV one owns BLOCK_N keys
of a key head and walks along the queries of all its query heads. 14 Lq Lk D flops per head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn._triton.philox import keep_mask
from fastattn.ops.attention._triton_common_kernels import (
    ANY_VALUE,
    head_base,
    hide,
    key_range,
    load_padding,
    load_tile,
    load_visible_tile,
    query_range,
    sequence,
    shares,
    store_tile,
    unpadded_range,
)


@triton.jit(do_not_specialize=ANY_VALUE)
def _attention_delta_kernel(
    output,  # [B, Hq, Lq, DV] or packed
    grad,  # as output
    grad_lse,  # as delta
    weight_sums,  # as delta: rowsum(dW W)
    delta,  # [B, Hq, Lq] or packed [Hq, T]
    q_ends,  # int32 [B + 1]
    heads, q_len, tiles,
    out_batch, out_head, out_row,
    grad_batch, grad_head, grad_row,
    delta_batch, delta_head,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, IS_PACKED: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr, HAS_WEIGHT_SUMS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) % tiles * BLOCK_M
    bh = tl.program_id(0) // tiles
    b, h = bh // heads, bh % heads
    q_start, q_len = sequence(q_ends, b, q_len, IS_PACKED)
    if first >= q_len:
        return
    output = head_base(output, b, h, q_start, out_batch, out_head, out_row)
    grad = head_base(grad, b, h, q_start, grad_batch, grad_head, grad_row)
    o = load_tile(output, first, out_row, q_len, BLOCK_M, DV, BLOCK_DV, True)
    do = load_tile(grad, first, grad_row, q_len, BLOCK_M, DV, BLOCK_DV, True)
    sums = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    i = first + tl.arange(0, BLOCK_M)
    place = b.to(tl.int64) * delta_batch + h.to(tl.int64) * delta_head + q_start + i
    if HAS_GRAD_LSE:
        sums -= tl.load(grad_lse + place, mask=i < q_len, other=0.0)
    if HAS_WEIGHT_SUMS:
        sums += tl.load(weight_sums + place, mask=i < q_len, other=0.0)
    tl.store(delta + place, sums, mask=i < q_len)


@triton.jit(do_not_specialize=ANY_VALUE)
def _attention_dq_kernel(
    q, k, v, mask, padding, rng_state, q_ends, kv_ends,  # as the forward's
    grad,  # [B, Hq, Lq, DV]: of the output
    grad_weights,  # [B, Hq, Lq, Lk] by strides
    lse,  # [B, Hq, Lq] or packed [Hq, T]; so lse_low and delta
    lse_low,
    delta,
    grad_q,  # [B, Hq, Lq, DK], the last dimension dense
    grad_scores,  # float32 [B, Hq, Lq, Lk], contiguous, zeros
    heads, group, q_len, kv_len, tiles,
    q_batch, q_head, q_row,
    k_batch, k_head, k_row,
    v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row,
    padding_batch, padding_column,
    grad_batch, grad_head, grad_row,
    gw_batch, gw_head, gw_row,
    lse_batch, lse_head,
    dq_batch, dq_head, dq_row,
    scale, left, right, last_dropped, keep_scale,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr,
    MASK_COLUMN: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_GRAD_WEIGHTS: tl.constexpr,
    DROPS: tl.constexpr, WANTS_SCORES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tiles - 1 - tl.program_id(0) % tiles
    bh = tl.program_id(0) // tiles
    b, h = bh // heads, bh % heads
    q_start, q_len = sequence(q_ends, b, q_len, IS_PACKED)
    kv_start, kv_len = sequence(kv_ends, b, kv_len, IS_PACKED)
    first = tile * BLOCK_M
    if first >= q_len:
        return
    q = head_base(q, b, h, q_start, q_batch, q_head, q_row)
    k = head_base(k, b, h // group, kv_start, k_batch, k_head, k_row)
    v = head_base(v, b, h // group, kv_start, v_batch, v_head, v_row)
    grad = head_base(grad, b, h, q_start, grad_batch, grad_head, grad_row)
    grad_q = head_base(grad_q, b, h, q_start, dq_batch, dq_head, dq_row)
    mask = head_base(mask, b, h, 0, mask_batch, mask_head, 0)
    grad_weights = head_base(grad_weights, b, h, 0, gw_batch, gw_head, 0)
    grad_scores += bh.to(tl.int64) * q_len * kv_len
    padding += b.to(tl.int64) * padding_batch
    diagonal = kv_len - q_len if BOTTOM_RIGHT else 0
    low, high = 0, kv_len
    if HAS_PADDING:
        low, high = unpadded_range(padding, padding_column, kv_len, 16 * BLOCK_N)
    begin, whole_begin, whole_end, end = key_range(
        first, q_len, kv_len, diagonal, left, right, low, high, BLOCK_M, BLOCK_N, HAS_LEFT,
        HAS_RIGHT,
    )  # fmt: skip

    i = first + tl.arange(0, BLOCK_M)
    row = b.to(tl.int64) * lse_batch + h.to(tl.int64) * lse_head + q_start + i
    q_tile = load_tile(q, first, q_row, q_len, BLOCK_M, DK, BLOCK_DK, True)
    do = load_tile(grad, first, grad_row, q_len, BLOCK_M, DV, BLOCK_DV, True)
    row_lse = tl.load(lse + row, mask=i < q_len, other=0.0)
    row_low = tl.load(lse_low + row, mask=i < q_len, other=0.0)
    row_delta = tl.load(delta + row, mask=i < q_len, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_DK], tl.float32)
    if HAS_LEFT:
        dq = _walk_keys(
            dq, q_tile, do, row_lse, row_low, row_delta, k, v, mask, padding, rng_state,
            grad_weights, grad_scores, begin, whole_begin, first, bh, q_len, kv_len, diagonal, left,
            right, k_row, v_row, mask_row, padding_column, gw_row, scale, last_dropped, keep_scale,
            DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, MASK,
            MASK_COLUMN, HAS_PADDING, HAS_GRAD_WEIGHTS, DROPS, WANTS_SCORES, PRECISION,
        )  # fmt: skip
    dq = _walk_keys(
        dq, q_tile, do, row_lse, row_low, row_delta, k, v, mask, padding, rng_state, grad_weights,
        grad_scores, whole_begin, whole_end, first, bh, q_len, kv_len, diagonal, left, right, k_row,
        v_row, mask_row, padding_column, gw_row, scale, last_dropped, keep_scale, DK, DV, BLOCK_DK,
        BLOCK_DV, BLOCK_M, BLOCK_N, False, HAS_LEFT, HAS_RIGHT, MASK, MASK_COLUMN, HAS_PADDING,
        HAS_GRAD_WEIGHTS, DROPS, WANTS_SCORES, PRECISION,
    )  # fmt: skip
    dq = _walk_keys(
        dq, q_tile, do, row_lse, row_low, row_delta, k, v, mask, padding, rng_state, grad_weights,
        grad_scores, whole_end, end, first, bh, q_len, kv_len, diagonal, left, right, k_row, v_row,
        mask_row, padding_column, gw_row, scale, last_dropped, keep_scale, DK, DV, BLOCK_DK,
        BLOCK_DV, BLOCK_M, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, MASK, MASK_COLUMN, HAS_PADDING,
        HAS_GRAD_WEIGHTS, DROPS, WANTS_SCORES, PRECISION,
    )  # fmt: skip
    store_tile(grad_q, first, dq_row, q_len, dq * scale, BLOCK_M, DK, BLOCK_DK)


@triton.jit
def _walk_keys(
    dq, q_tile, do, row_lse, row_low, row_delta, k, v, mask, padding, rng_state, grad_weights,
    grad_scores, begin, end, first, bh, q_len, kv_len, diagonal, left, right, k_row,
    v_row, mask_row, padding_column, gw_row, scale,
    last_dropped, keep_scale,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_EDGE: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, MASK_COLUMN: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_GRAD_WEIGHTS: tl.constexpr, DROPS: tl.constexpr,
    WANTS_SCORES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i = first + tl.arange(0, BLOCK_M)
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
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        scores = hide(
            scores, i[:, None], j[None, :], q_len, kv_len, diagonal, left, right, mask, mask_row,
            padded[None, :], IS_EDGE, HAS_LEFT, HAS_RIGHT, MASK, MASK_COLUMN, HAS_PADDING,
        )  # fmt: skip
        p = shares(scores, row_lse[:, None], row_low[:, None])
        dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        inside = (i < q_len)[:, None] & (j < kv_len)[None, :]
        if HAS_GRAD_WEIGHTS:
            places = grad_weights + i.to(tl.int64)[:, None] * gw_row + j[None, :]
            dp += tl.load(places, mask=inside, other=0.0).to(tl.float32)
        if DROPS:
            keep = keep_mask(
                rng_state, start, i, tl.full([BLOCK_M], 0, tl.int32) + bh, last_dropped, BLOCK_N
            )
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = p * (dp - row_delta[:, None])
        if WANTS_SCORES:
            places = i.to(tl.int64)[:, None] * kv_len + j[None, :]
            tl.store(grad_scores + places, ds, mask=inside)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=ANY_VALUE)
def _attention_dkdv_kernel(
    q, k, v, mask, padding, rng_state, q_ends, kv_ends,  # as the forward's
    grad,  # [B, Hq, Lq, DV]: of the output
    grad_weights,  # [B, Hq, Lq, Lk] by strides
    lse,  # [B, Hq, Lq] or packed [Hq, T]; so lse_low and delta
    lse_low,
    delta,
    grad_k,  # [B, Hk, Lk, DK], the last dimension dense
    grad_v,  # [B, Hk, Lk, DV], the last dimension dense
    kv_heads, group, q_len, kv_len, tiles,
    q_batch, q_head, q_row,
    k_batch, k_head, k_row,
    v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row,
    padding_batch, padding_column,
    grad_batch, grad_head, grad_row,
    gw_batch, gw_head, gw_row,
    lse_batch, lse_head,
    dk_batch, dk_head, dk_row,
    dv_batch, dv_head, dv_row,
    scale, left, right, last_dropped, keep_scale,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr,
    MASK_COLUMN: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_GRAD_WEIGHTS: tl.constexpr,
    DROPS: tl.constexpr, WANTS_K: tl.constexpr, WANTS_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % tiles  # under a causal pattern the longest come first
    bh = tl.program_id(0) // tiles
    b, kv_head = bh // kv_heads, bh % kv_heads
    q_start, q_len = sequence(q_ends, b, q_len, IS_PACKED)
    kv_start, kv_len = sequence(kv_ends, b, kv_len, IS_PACKED)
    first = tile * BLOCK_N
    if first >= kv_len:
        return
    k = head_base(k, b, kv_head, kv_start, k_batch, k_head, k_row)
    v = head_base(v, b, kv_head, kv_start, v_batch, v_head, v_row)
    diagonal = kv_len - q_len if BOTTOM_RIGHT else 0
    begin, whole_begin, whole_end, end = query_range(
        first, q_len, diagonal, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    padded = first + tl.arange(0, BLOCK_N)
    if HAS_PADDING:
        padding += b.to(tl.int64) * padding_batch
        padded = load_padding(padding, first, padding_column, kv_len, BLOCK_N)
        k_tile = load_visible_tile(k, first, k_row, padded, kv_len, BLOCK_N, DK, BLOCK_DK)
        v_tile = load_visible_tile(v, first, v_row, padded, kv_len, BLOCK_N, DV, BLOCK_DV)
        if tl.min(padded.to(tl.int32), 0) != 0:  # all of the tile is padding
            whole_begin, whole_end, end = begin, begin, begin
    else:
        k_tile = load_tile(k, first, k_row, kv_len, BLOCK_N, DK, BLOCK_DK, True)
        v_tile = load_tile(v, first, v_row, kv_len, BLOCK_N, DV, BLOCK_DV, True)

    dk = tl.zeros([BLOCK_N, BLOCK_DK], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for h in range(kv_head * group, kv_head * group + group):
        q_base = head_base(q, b, h, q_start, q_batch, q_head, q_row)
        grad_base = head_base(grad, b, h, q_start, grad_batch, grad_head, grad_row)
        mask_base = head_base(mask, b, h, 0, mask_batch, mask_head, 0)
        gw_base = head_base(grad_weights, b, h, 0, gw_batch, gw_head, 0)
        row = b.to(tl.int64) * lse_batch + tl.cast(h, tl.int64) * lse_head + q_start
        word = b * kv_heads * group + h
        if HAS_RIGHT:
            dk, dv = _walk_queries(
                dk, dv, k_tile, v_tile, padded, q_base, grad_base, mask_base, gw_base, rng_state,
                lse + row, lse_low + row, delta + row, begin, whole_begin, first, word, q_len,
                kv_len, diagonal, left, right, q_row, grad_row, mask_row, gw_row, scale,
                last_dropped, keep_scale, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, True,
                HAS_LEFT, HAS_RIGHT, MASK, MASK_COLUMN, HAS_PADDING, HAS_GRAD_WEIGHTS, DROPS,
                WANTS_K, WANTS_V, PRECISION,
            )  # fmt: skip
        dk, dv = _walk_queries(
            dk, dv, k_tile, v_tile, padded, q_base, grad_base, mask_base, gw_base, rng_state, lse +
            row, lse_low + row, delta + row, whole_begin, whole_end, first, word, q_len, kv_len,
            diagonal, left, right, q_row, grad_row, mask_row, gw_row, scale, last_dropped,
            keep_scale, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, False, HAS_LEFT, HAS_RIGHT,
            MASK, MASK_COLUMN, HAS_PADDING, HAS_GRAD_WEIGHTS, DROPS, WANTS_K, WANTS_V, PRECISION,
        )  # fmt: skip
        if HAS_LEFT:
            dk, dv = _walk_queries(
                dk, dv, k_tile, v_tile, padded, q_base, grad_base, mask_base, gw_base, rng_state,
                lse + row, lse_low + row, delta + row, whole_end, end, first, word, q_len, kv_len,
                diagonal, left, right, q_row, grad_row, mask_row, gw_row, scale, last_dropped,
                keep_scale, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_M, BLOCK_N, True, HAS_LEFT, HAS_RIGHT,
                MASK, MASK_COLUMN, HAS_PADDING, HAS_GRAD_WEIGHTS, DROPS, WANTS_K, WANTS_V,
                PRECISION,
            )  # fmt: skip
    if WANTS_K:
        grad_k = head_base(grad_k, b, kv_head, kv_start, dk_batch, dk_head, dk_row)
        store_tile(grad_k, first, dk_row, kv_len, dk * scale, BLOCK_N, DK, BLOCK_DK)
    if WANTS_V:
        grad_v = head_base(grad_v, b, kv_head, kv_start, dv_batch, dv_head, dv_row)
        store_tile(grad_v, first, dv_row, kv_len, dv, BLOCK_N, DV, BLOCK_DV)


@triton.jit
def _walk_queries(
    dk, dv, k_tile, v_tile, padded, q, grad, mask, grad_weights, rng_state, lse, lse_low, delta,
    begin, end, first, word, q_len, kv_len, diagonal, left, right, q_row, grad_row,
    mask_row, gw_row, scale, last_dropped, keep_scale,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_EDGE: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, MASK_COLUMN: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_GRAD_WEIGHTS: tl.constexpr, DROPS: tl.constexpr,
    WANTS_K: tl.constexpr, WANTS_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries ``begin`` to ``end``, tiles [BLOCK_N, BLOCK_M]: transposed, so that P and dS are the
    left factors of their products as they come. Queries past the end load zeros and add nothing;
    keys past the end make rows that are never stored."""
    j = first + tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, start, q_row, q_len, BLOCK_M, DK, BLOCK_DK, True)
        do = load_tile(grad, start, grad_row, q_len, BLOCK_M, DV, BLOCK_DV, True)
        row_lse = tl.load(lse + i, mask=i < q_len, other=0.0)
        row_low = tl.load(lse_low + i, mask=i < q_len, other=0.0)
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale
        scores = hide(
            scores, i[None, :], j[:, None], q_len, kv_len, diagonal, left, right, mask, mask_row,
            padded[:, None], IS_EDGE, HAS_LEFT, HAS_RIGHT, MASK, MASK_COLUMN, HAS_PADDING,
        )  # fmt: skip
        p = shares(scores, row_lse[None, :], row_low[None, :])
        weights = p
        if DROPS:
            words = tl.full([BLOCK_M], 0, tl.int32) + word
            keep = tl.trans(keep_mask(rng_state, first, i, words, last_dropped, BLOCK_N))
            weights = tl.where(keep, p * keep_scale, 0.0)
        if WANTS_V:
            dv = tl.dot(weights.to(do.dtype), do, dv, input_precision=PRECISION)
        if WANTS_K:
            dp = tl.dot(v_tile, tl.trans(do), input_precision=PRECISION)
            if HAS_GRAD_WEIGHTS:
                places = grad_weights + i.to(tl.int64)[None, :] * gw_row + j[:, None]
                inside = (i < q_len)[None, :] & (j < kv_len)[:, None]
                dp += tl.load(places, mask=inside, other=0.0).to(tl.float32)
            if DROPS:
                dp = tl.where(keep, dp * keep_scale, 0.0)
            row_delta = tl.load(delta + i, mask=i < q_len, other=0.0)
            ds = p * (dp - row_delta[None, :])
            dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv
