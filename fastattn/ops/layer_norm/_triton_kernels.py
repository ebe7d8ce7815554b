"""LayerNorm(residual + dropout(x)) over rows, and its gradients (Ba et al. 2016).

One block owns ROWS rows at a time. A row that fits BLOCK is read once and kept in registers; a
longer one is walked along thrice: mean, variance, result. Statistics are float32 in two passes.
The parameters' gradients are summed in two stages, by block and then over the blocks, in an order
that never changes: no atomics, no locks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn._triton.philox import keep_mask


@triton.jit(do_not_specialize=["last_dropped"])
def _layer_norm_fwd_kernel(
    x,  # [rows, columns]
    residual,  # [rows, columns]
    weight,  # [columns]
    bias,  # [columns]
    out,  # [rows, columns], contiguous, as all results
    total_out,  # [rows, columns]: residual + dropout(x)
    mean_out,  # [rows]
    rstd_out,  # [rows]
    rows,
    columns,
    x_row,
    x_column,
    residual_row,
    residual_column,
    eps,
    rng_state,  # int64 [2]
    last_dropped,
    keep_scale,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEPS_SUM: tl.constexpr,
    DROPS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide = row.to(tl.int64)[:, None]
    x += wide * x_row
    residual += wide * residual_row
    out += wide * columns
    total_out += wide * columns
    if IS_WHOLE:
        total = _load_sum(
            x, residual, row, rows, 0, columns, x_column, residual_column, rng_state,
            last_dropped, keep_scale, HAS_RESIDUAL, DROPS, BLOCK,
        )  # fmt: skip
        mean = tl.sum(total, 1) / columns
        variance = tl.sum(_centred_squares(total, mean, 0, columns, BLOCK), 1) / columns
        rstd = 1.0 / tl.sqrt(variance + eps)
        if KEEPS_SUM:
            _store(total_out, total, row, rows, 0, columns, BLOCK)
        normal = (total - mean[:, None]) * rstd[:, None]
        normal = _affine(normal, weight, bias, 0, columns, HAS_WEIGHT, HAS_BIAS, BLOCK)
        _store(out, normal, row, rows, 0, columns, BLOCK)
    else:
        sums = tl.zeros([ROWS], tl.float32)
        for start in range(0, columns, BLOCK):
            total = _load_sum(
                x, residual, row, rows, start, columns, x_column, residual_column, rng_state,
                last_dropped, keep_scale, HAS_RESIDUAL, DROPS, BLOCK,
            )  # fmt: skip
            if KEEPS_SUM:
                _store(total_out, total, row, rows, start, columns, BLOCK)
            sums += tl.sum(total, 1)
        mean = sums / columns
        squares = tl.zeros([ROWS], tl.float32)
        for start in range(0, columns, BLOCK):
            total = _load_sum(
                x, residual, row, rows, start, columns, x_column, residual_column, rng_state,
                last_dropped, keep_scale, HAS_RESIDUAL, DROPS, BLOCK,
            )  # fmt: skip
            squares += tl.sum(_centred_squares(total, mean, start, columns, BLOCK), 1)
        rstd = 1.0 / tl.sqrt(squares / columns + eps)
        for start in range(0, columns, BLOCK):
            total = _load_sum(
                x, residual, row, rows, start, columns, x_column, residual_column, rng_state,
                last_dropped, keep_scale, HAS_RESIDUAL, DROPS, BLOCK,
            )  # fmt: skip
            normal = (total - mean[:, None]) * rstd[:, None]
            normal = _affine(normal, weight, bias, start, columns, HAS_WEIGHT, HAS_BIAS, BLOCK)
            _store(out, normal, row, rows, start, columns, BLOCK)
    tl.store(mean_out + row, mean, mask=row < rows)
    tl.store(rstd_out + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["last_dropped"])
def _layer_norm_bwd_kernel(
    grad,  # [rows, columns]: of out
    grad_sum,  # [rows, columns]
    total,  # [rows, columns]
    weight,  # [columns]
    mean,  # [rows]
    rstd,  # [rows]
    grad_x,  # [rows, columns], contiguous, as all results
    grad_residual,  # [rows, columns]
    partial,  # [programs, 2, columns]: sums over a program's rows for weight and bias
    rows,
    columns,
    grad_row,
    grad_column,
    grad_sum_row,
    grad_sum_column,
    total_row,
    total_column,
    weight_column,
    rng_state,  # int64 [2]
    last_dropped,
    keep_scale,
    HAS_GRAD_SUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WANTS_X: tl.constexpr,
    WANTS_RESIDUAL: tl.constexpr,
    SUMS_ROWS: tl.constexpr,
    DROPS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    weight_sums = tl.zeros([BLOCK], tl.float32)
    bias_sums = tl.zeros([BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        wide = row.to(tl.int64)[:, None]
        g_row, t_row = grad + wide * grad_row, total + wide * total_row
        row_mean = tl.load(mean + row, mask=row < rows, other=0.0)
        row_rstd = tl.load(rstd + row, mask=row < rows, other=0.0)
        average = tl.zeros([ROWS], tl.float32)
        projection = tl.zeros([ROWS], tl.float32)
        if not IS_WHOLE:
            for start in range(0, columns, BLOCK):
                g, xhat, scaled = _load_gradient(
                    g_row, t_row, weight, row_mean, row_rstd, row, rows, start, columns,
                    grad_column, total_column, weight_column, HAS_WEIGHT, BLOCK,
                )  # fmt: skip
                average += tl.sum(scaled, 1)
                projection += tl.sum(scaled * xhat, 1)
        for start in range(0, columns, BLOCK):
            g, xhat, scaled = _load_gradient(
                g_row, t_row, weight, row_mean, row_rstd, row, rows, start, columns,
                grad_column, total_column, weight_column, HAS_WEIGHT, BLOCK,
            )  # fmt: skip
            if IS_WHOLE:
                average = tl.sum(scaled, 1)
                projection = tl.sum(scaled * xhat, 1)
            inner = scaled - (average / columns)[:, None] - xhat * (projection / columns)[:, None]
            found = row_rstd[:, None] * inner
            if HAS_GRAD_SUM:
                found += _load(
                    grad_sum + wide * grad_sum_row, row, rows, start, columns, grad_sum_column,
                    BLOCK,
                )  # fmt: skip
            if WANTS_RESIDUAL:
                _store(grad_residual + wide * columns, found, row, rows, start, columns, BLOCK)
            if WANTS_X:
                if DROPS:
                    zeros = tl.zeros_like(row)
                    keep = keep_mask(rng_state, start, row, zeros, last_dropped, BLOCK)
                    found = tl.where(keep, found * keep_scale, 0.0)
                _store(grad_x + wide * columns, found, row, rows, start, columns, BLOCK)
            if SUMS_ROWS:
                weight_sums += tl.sum(g * xhat, 0)
                bias_sums += tl.sum(g, 0)
    if SUMS_ROWS:
        column = tl.arange(0, BLOCK)
        partial += tl.program_id(0).to(tl.int64) * 2 * columns
        tl.store(partial + column, weight_sums, mask=column < columns)
        tl.store(partial + columns + column, bias_sums, mask=column < columns)


@triton.jit
def _layer_norm_sums_kernel(
    grad,  # [rows, columns]
    total,  # [rows, columns]
    mean,  # [rows]
    rstd,  # [rows]
    partial,  # [splits, 2, columns]
    rows,
    columns,
    splits,
    grad_row,
    grad_column,
    total_row,
    total_column,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    split = tl.program_id(0) % splits
    start = tl.program_id(0) // splits * BLOCK
    weight_sums = tl.zeros([BLOCK], tl.float32)
    bias_sums = tl.zeros([BLOCK], tl.float32)
    for first in range(split * ROWS, rows, splits * ROWS):
        row = first + tl.arange(0, ROWS)
        wide = row.to(tl.int64)[:, None]
        row_mean = tl.load(mean + row, mask=row < rows, other=0.0)
        row_rstd = tl.load(rstd + row, mask=row < rows, other=0.0)
        g, xhat, _ = _load_gradient(
            grad + wide * grad_row, total + wide * total_row, mean, row_mean, row_rstd, row, rows,
            start, columns, grad_column, total_column, 0, False, BLOCK,
        )  # fmt: skip
        weight_sums += tl.sum(g * xhat, 0)
        bias_sums += tl.sum(g, 0)
    column = start + tl.arange(0, BLOCK)
    partial += split.to(tl.int64) * 2 * columns
    tl.store(partial + column, weight_sums, mask=column < columns)
    tl.store(partial + columns + column, bias_sums, mask=column < columns)


@triton.jit
def _load_sum(
    x, residual, row, rows, start, columns, x_column, residual_column, rng_state, last_dropped,
    keep_scale, HAS_RESIDUAL: tl.constexpr, DROPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """residual + dropout(x), float32 [ROWS, BLOCK], 0 outside."""
    total = _load(x, row, rows, start, columns, x_column, BLOCK)
    if DROPS:
        keep = keep_mask(rng_state, start, row, tl.zeros_like(row), last_dropped, BLOCK)
        total = tl.where(keep, total * keep_scale, 0.0)
    if HAS_RESIDUAL:
        total += _load(residual, row, rows, start, columns, residual_column, BLOCK)
    return total


@triton.jit
def _load_gradient(
    grad, total, weight, mean, rstd, row, rows, start, columns, grad_column, total_column,
    weight_column, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(grad, normalised sum, grad * weight), float32 [ROWS, BLOCK], 0 outside."""
    g = _load(grad, row, rows, start, columns, grad_column, BLOCK)
    xhat = (_load(total, row, rows, start, columns, total_column, BLOCK) - mean[:, None]) * rstd[
        :, None
    ]
    column = start + tl.arange(0, BLOCK)
    xhat = tl.where((row < rows)[:, None] & (column < columns)[None, :], xhat, 0.0)
    scaled = g
    if HAS_WEIGHT:
        factor = tl.load(
            weight + column.to(tl.int64) * weight_column, mask=column < columns, other=0.0
        )
        scaled = g * factor.to(tl.float32)[None, :]
    return g, xhat, scaled


@triton.jit
def _centred_squares(total, mean, start, columns, BLOCK: tl.constexpr):
    inside = (start + tl.arange(0, BLOCK) < columns)[None, :]
    centred = tl.where(inside, total - mean[:, None], 0.0)
    return centred * centred


@triton.jit
def _affine(
    normal, weight, bias, start, columns, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    column = start + tl.arange(0, BLOCK)
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=column < columns, other=0.0)
        normal *= factor.to(tl.float32)[None, :]
    if HAS_BIAS:
        shift = tl.load(bias + column, mask=column < columns, other=0.0)
        normal += shift.to(tl.float32)[None, :]
    return normal


@triton.jit
def _load(x, row, rows, start, columns, x_column, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    places = x + column.to(tl.int64)[None, :] * x_column
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(out, values, row, rows, start, columns, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + column[None, :], values.to(out.dtype.element_ty), mask=inside)
