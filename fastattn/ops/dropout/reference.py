"""Dropout in plain PyTorch, by the common Philox."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn._philox import keep_scale, rowwise_keep_mask


def why_not(*_: object) -> str | None:
    return None


def fwd(x: Tensor, rng_state: Tensor, p: float) -> Tensor:
    """x where kept, times 1 / (1 - p), else 0; contiguous, in x's dtype."""
    keep = rowwise_keep_mask(rng_state, p, x.shape)
    scaled = x.to(torch.promote_types(x.dtype, torch.float32)) * keep_scale(p)
    return torch.where(keep, scaled, 0.0).to(x.dtype).contiguous()
