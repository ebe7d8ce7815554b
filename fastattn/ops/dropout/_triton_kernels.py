"""out = x * keep / (1 - p), keep from Philox by position.

One block owns [ROWS, BLOCK] elements; reads and writes every element once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn._triton.philox import keep_mask


@triton.jit(do_not_specialize=["last_dropped"])
def _dropout_fwd_kernel(
    x,  # [rows, columns]
    out,  # [rows, columns], contiguous
    rng_state,  # int64 [2]
    rows,
    columns,
    x_row,
    x_column,
    last_dropped,
    keep_scale,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(columns, BLOCK)
    first = (tl.program_id(0) % tiles) * BLOCK
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    column = first + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    wide = row.to(tl.int64)[:, None]
    places = wide * x_row + column.to(tl.int64)[None, :] * x_column
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    keep = keep_mask(rng_state, first, row, tl.zeros_like(row), last_dropped, BLOCK)
    values = tl.where(keep, values * keep_scale, 0.0)
    tl.store(out + wide * columns + column[None, :], values.to(out.dtype.element_ty), mask=inside)
