"""The chunked cross entropy that backends share: torch.mm for the products, their own row pass.

A chunk of tokens has its logits formed, turned into losses and (in place) gradients, multiplied
out, and dropped; so no more than ``CHUNK_BYTES`` of logits exist at any time, on a GPU
``GPU_CHUNK_BYTES``, which its products need to fill it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.ops.cross_entropy.reference import CrossEntropyConfig, reduce

CHUNK_BYTES = 16 * 2**20
GPU_CHUNK_BYTES = 256 * 2**20
# Half products with float32 results, which nothing has rounded: torch 2.8 has them on NVIDIA GPUs.
_MM_WIDENS = hasattr(torch.ops.aten.mm, "dtype") and torch.version.hip is None


class RowResult(NamedTuple):
    """Per token of a chunk: loss, nll, lse [T]. The logits have become gradients, if asked for."""

    loss: Tensor
    nll: Tensor
    lse: Tensor


RowPass = Callable[
    [Tensor, Tensor, Tensor | None, CrossEntropyConfig, Tensor | None], RowResult
]  # (logits [T, V] fp32/fp64, target, class_weight, cfg, factor [T] of the gradients or None)


def fwd(
    row_pass: RowPass,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    target: Tensor,
    cfg: CrossEntropyConfig,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    counts = target != cfg.ignore_index
    wants_grads = cfg.reduction != "none" and any(needs)
    divisor = _divisor(target, counts, class_weight, dtype) if cfg.reduction == "mean" else None
    factor = None
    if wants_grads:
        factor = counts.to(dtype) if divisor is None else counts / divisor
    loss, nll, lse = (hidden.new_empty(len(target), dtype=dtype) for _ in range(3))
    grads = _Gradients(hidden, weight, bias, needs if wants_grads else (False, False, False))
    for rows in _chunks(hidden, weight):
        logits = _logits(hidden[rows], weight, bias, dtype)
        row_factor = None if factor is None else factor[rows]
        found = row_pass(logits, target[rows], class_weight, cfg, row_factor)
        loss[rows], nll[rows], lse[rows] = found
        grads.add(rows, logits)
    if cfg.reduction != "none":
        loss, nll = reduce(loss, divisor), reduce(nll, divisor)
    return loss, nll, lse, *grads.finish()


def bwd(
    row_pass: RowPass,
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    target: Tensor,
    lse: Tensor,
    cfg: CrossEntropyConfig,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    factor = grad_loss.to(lse.dtype) * (target != cfg.ignore_index)
    grads = _Gradients(hidden, weight, bias, needs)
    for rows in _chunks(hidden, weight):
        logits = _logits(hidden[rows], weight, bias, lse.dtype)
        row_pass(logits, target[rows], class_weight, cfg, factor[rows])
        grads.add(rows, logits)
    return grads.finish()


class _Gradients:
    """Gradients of hidden, weight and bias, accumulated chunk by chunk in float32 or float64."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool]
    ):
        self.inputs = hidden, weight, bias
        self.needs = (needs[0], needs[1], needs[2] and bias is not None)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = self.bias = None
        if self.needs[1]:
            self.weight = weight.new_zeros(weight.shape, dtype=wide)
        if self.needs[2]:
            self.bias = weight.new_zeros(len(weight), dtype=wide)

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        hidden, weight, _ = self.inputs
        grad = grad_logits if hidden.dtype == grad_logits.dtype else grad_logits.to(hidden.dtype)
        if self.hidden is not None:
            torch.mm(grad, weight, out=self.hidden[rows])
        if self.weight is not None:
            if grad is grad_logits:
                self.weight.addmm_(grad.T, hidden[rows])
            else:
                self.weight += _wide_product(grad.T, hidden[rows], self.weight.dtype)
        if self.bias is not None:
            self.bias += grad_logits.sum(0)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, bias = self.inputs
        return (
            hidden.new_empty(0) if self.hidden is None else self.hidden,
            hidden.new_empty(0) if self.weight is None else self.weight.to(weight.dtype),
            hidden.new_empty(0) if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


def _divisor(
    target: Tensor, counts: Tensor, class_weight: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if class_weight is None:
        return counts.sum().to(dtype)
    return (class_weight.to(dtype)[target.masked_fill(~counts, 0)] * counts).sum()


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    logits = _wide_product(rows, weight.T, dtype)
    return logits if bias is None else logits.add_(bias.to(dtype))


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in ``dtype``, never rounded to a narrower one of the factors."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda and _MM_WIDENS:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    wide = torch.promote_types(hidden.dtype, torch.float32).itemsize
    room = GPU_CHUNK_BYTES if hidden.is_cuda else CHUNK_BYTES
    size = max(16, room // max(1, wide * len(weight)))
    return [slice(i, min(i + size, len(hidden))) for i in range(0, len(hidden), size)]
