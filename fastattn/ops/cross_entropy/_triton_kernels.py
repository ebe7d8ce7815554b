"""Losses of rows of logits, which become gradients in place.

    loss = a w_t (-log p_t) + b sum_c w_c (-log p_c),  log p_c = (z_c - max) - log sum exp(z - max)
    dz_c = ((a w_t + b sum w) p_c - a w_t [c = t] - b w_c) * factor

One block owns one token and walks along its classes twice: for the maximum and the sum, then for
the gradient and the smoothed part. Reads V logits twice (the second time from cache, as a rule) and
writes V gradients; all in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_rows_kernel(
    logits,  # float32 [T, V]; gradients afterwards, if wanted
    target,  # int64 [T]
    class_weight,  # [V]
    factor,  # float32 [T]: of the gradients
    loss,  # float32 [T]
    nll,  # float32 [T]
    lse,  # float32 [T]
    classes,
    logits_row,
    target_row,
    weight_column,
    ignore_index,
    a,
    b,
    HAS_WEIGHTS: tl.constexpr,
    SMOOTHS: tl.constexpr,
    WANTS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    logits += token * logits_row
    truth = tl.load(target + token * target_row)
    counts = truth != ignore_index
    truth = tl.where(counts, truth, 0)

    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, classes, BLOCK):
        z = _load(logits, start, classes, -float("inf"), BLOCK)
        higher = tl.maximum(highest, z)
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp2((highest - safe) * LOG2E) + tl.exp2((z - safe) * LOG2E)
        highest = higher
    top = tl.max(highest, 0)
    finite = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(total * tl.exp2((highest - finite) * LOG2E), 0)
    log_total = tl.log(total)

    truth_weight = 1.0
    if HAS_WEIGHTS:
        truth_weight = tl.load(class_weight + truth * weight_column).to(tl.float32)
    truth_logit = tl.load(logits + truth)
    truth_nll = truth_weight * (log_total - (truth_logit - top))
    truth_loss = a * truth_nll
    tl.debug_barrier()  # the truth's logit is read before any thread overwrites it

    if SMOOTHS or WANTS_GRADIENT:
        weight_sum = classes * 1.0
        if HAS_WEIGHTS and SMOOTHS:
            sums = tl.zeros([BLOCK], tl.float32)
            for start in range(0, classes, BLOCK):
                sums += _load_weights(class_weight, start, classes, weight_column, BLOCK)
            weight_sum = tl.sum(sums, 0)
        share = a * truth_weight
        if SMOOTHS:
            share += b * weight_sum
        scale = 1.0
        if WANTS_GRADIENT:
            scale = tl.load(factor + token)
        smoothed = tl.zeros([BLOCK], tl.float32)
        for start in range(0, classes, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z = _load(logits, start, classes, -float("inf"), BLOCK)
            log_p = (z - top) - log_total
            gradient = share * tl.exp2(log_p * LOG2E)
            if SMOOTHS:
                w = 1.0
                if HAS_WEIGHTS:
                    w = _load_weights(class_weight, start, classes, weight_column, BLOCK)
                smoothed -= tl.where(column < classes, w * log_p, 0.0)
                gradient -= b * w
            if WANTS_GRADIENT:
                gradient -= tl.where(column == truth, a * truth_weight, 0.0)
                gradient = tl.where(counts, gradient * scale, 0.0)
                tl.store(logits + column, gradient, mask=column < classes)
        if SMOOTHS:
            truth_loss += b * tl.sum(smoothed, 0)
    tl.store(loss + token, tl.where(counts, truth_loss, 0.0))
    tl.store(nll + token, tl.where(counts, truth_nll, 0.0))
    tl.store(lse + token, top + log_total)


@triton.jit
def _load(logits, start, classes, other: tl.constexpr, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    return tl.load(logits + column, mask=column < classes, other=other)


@triton.jit
def _load_weights(class_weight, start, classes, weight_column, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    places = class_weight + column.to(tl.int64) * weight_column
    return tl.load(places, mask=column < classes, other=0.0).to(tl.float32)
