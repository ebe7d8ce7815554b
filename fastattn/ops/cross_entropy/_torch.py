"""Cross entropy in chunks, the rows by torch's elementwise ops."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fastattn.ops.cross_entropy import _chunked
from fastattn.ops.cross_entropy._chunked import RowResult
from fastattn.ops.cross_entropy.reference import (
    CrossEntropyConfig,
    logits_gradient,
    losses,
)


def why_not(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    target: Tensor,
    cfg: CrossEntropyConfig,
    needs: tuple[bool, bool, bool],
) -> str | None:
    if hidden.dtype in (torch.float16, torch.bfloat16):
        return "half inputs: torch.mm would round the logits"
    return None


def _row_pass(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    cfg: CrossEntropyConfig,
    factor: Tensor | None,
) -> RowResult:
    counts = target != cfg.ignore_index
    safe_target = target.masked_fill(~counts, 0).unsqueeze(-1)
    w = logits.new_ones(logits.shape[-1]) if class_weight is None else class_weight.to(logits.dtype)
    target_weight = w[safe_target.squeeze(-1)] * counts
    lse = torch.logsumexp(logits, -1)
    log_probs, loss, nll = losses(logits, w, safe_target, target_weight, counts, cfg)
    if factor is not None:
        grads = logits_gradient(log_probs, w, safe_target, target_weight, cfg)
        torch.mul(grads, factor.unsqueeze(-1), out=logits)
        logits.masked_fill_(~counts.unsqueeze(-1), 0.0)
    return RowResult(loss, nll, lse)


fwd = partial(_chunked.fwd, _row_pass)
bwd = partial(_chunked.bwd, _row_pass)
