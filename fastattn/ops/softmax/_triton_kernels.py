"""softmax(scale * x + mask) over rows, and its gradient.

One block owns ROWS rows. A row that fits BLOCK is read once and kept in registers; a longer one is
walked along twice, the first time for its maximum and sum. Statistics are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
BOOL_MASK = tl.constexpr(1)
ADDED_MASK = tl.constexpr(2)


@triton.jit
def _softmax_fwd_kernel(
    x,  # [rows, columns]
    mask,  # [A, heads, length, columns]: rows in order; uint8 or floating
    out,  # [rows, columns], contiguous
    rows,
    columns,
    x_row,
    x_column,
    heads,
    length,
    mask_batch,
    mask_head,
    mask_row,
    mask_column,
    scale,
    MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    position = row % length
    head = row // length
    mask += (
        (head // heads).to(tl.int64) * mask_batch
        + (head % heads).to(tl.int64) * mask_head
        + position.to(tl.int64) * mask_row
    )[:, None]
    x += row.to(tl.int64)[:, None] * x_row
    out += row.to(tl.int64)[:, None] * columns
    alive = row < rows
    if IS_WHOLE:
        scores = _load_scores(
            x, mask, alive, position, 0, columns, x_column, mask_column, scale,
            MASK, IS_CAUSAL, BLOCK,
        )  # fmt: skip
        exps = _exp(scores - _finite(tl.max(scores, 1))[:, None])
        _store(out, exps / _not_zero(tl.sum(exps, 1))[:, None], alive, 0, columns, BLOCK)
    else:
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, columns, BLOCK):
            scores = _load_scores(
                x, mask, alive, position, start, columns, x_column, mask_column, scale,
                MASK, IS_CAUSAL, BLOCK,
            )  # fmt: skip
            higher = tl.maximum(highest, tl.max(scores, 1))
            exps = _exp(scores - _finite(higher)[:, None])
            total = total * _exp(highest - _finite(higher)) + tl.sum(exps, 1)
            highest = higher
        for start in range(0, columns, BLOCK):
            scores = _load_scores(
                x, mask, alive, position, start, columns, x_column, mask_column, scale,
                MASK, IS_CAUSAL, BLOCK,
            )  # fmt: skip
            exps = _exp(scores - _finite(highest)[:, None])
            _store(out, exps / _not_zero(total)[:, None], alive, start, columns, BLOCK)


@triton.jit
def _softmax_bwd_kernel(
    grad_out,  # [rows, columns]
    y,  # [rows, columns]: the forward's result
    grad_x,  # [rows, columns], contiguous
    rows,
    columns,
    grad_row,
    grad_column,
    y_row,
    y_column,
    scale,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = row < rows
    wide = row.to(tl.int64)[:, None]
    grad_out += wide * grad_row
    y += wide * y_row
    grad_x += wide * columns
    if IS_WHOLE:
        grad = _load(grad_out, alive, 0, columns, grad_column, BLOCK)
        share = _load(y, alive, 0, columns, y_column, BLOCK)
        dot = tl.sum(grad * share, 1)[:, None]
        _store(grad_x, scale * share * (grad - dot), alive, 0, columns, BLOCK)
    else:
        sums = tl.zeros([ROWS], tl.float32)
        for start in range(0, columns, BLOCK):
            grad = _load(grad_out, alive, start, columns, grad_column, BLOCK)
            sums += tl.sum(grad * _load(y, alive, start, columns, y_column, BLOCK), 1)
        for start in range(0, columns, BLOCK):
            grad = _load(grad_out, alive, start, columns, grad_column, BLOCK)
            share = _load(y, alive, start, columns, y_column, BLOCK)
            _store(grad_x, scale * share * (grad - sums[:, None]), alive, start, columns, BLOCK)


@triton.jit
def _load_scores(
    x, mask, alive, position, start, columns, x_column, mask_column, scale,
    MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, BLOCK] from column ``start`` on, -inf where hidden; hidden x is not read."""
    column = start + tl.arange(0, BLOCK)
    wide = column.to(tl.int64)[None, :]
    seen = alive[:, None] & (column < columns)[None, :]
    if IS_CAUSAL:
        seen = seen & (column[None, :] <= position[:, None])
    if MASK == BOOL_MASK:
        seen = seen & (tl.load(mask + wide * mask_column, mask=seen, other=0) != 0)
    scores = tl.load(x + wide * x_column, mask=seen, other=0.0).to(tl.float32) * scale
    if MASK == ADDED_MASK:
        scores += tl.load(mask + wide * mask_column, mask=seen, other=0.0).to(tl.float32)
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _load(x, alive, start, columns, x_column, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    inside = alive[:, None] & (column < columns)[None, :]
    places = x + column.to(tl.int64)[None, :] * x_column
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(out, values, alive, start, columns, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    inside = alive[:, None] & (column < columns)[None, :]
    tl.store(out + column[None, :], values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _finite(highest):
    """0 for a row that sees nothing, where (-inf) - (-inf) must not be formed."""
    return tl.where(highest == -float("inf"), 0.0, highest)


@triton.jit
def _not_zero(total):
    return tl.where(total == 0.0, 1.0, total)
