"""softmax(scale * x + mask) over the last dimension, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def why_not(*_: object) -> str | None:
    return None


def fwd(x: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """x [..., S], mask broadcastable to it -> [..., S] in x's dtype; unseeing rows are 0."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    scores = x.to(dtype) * scale
    if mask is not None:
        hide = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, _NEG) if hide else scores + mask.to(dtype)
    if is_causal:
        seen = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~seen, _NEG)
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    highest = scores.amax(-1, keepdim=True)
    highest = highest.masked_fill(highest == _NEG, 0.0)  # (-inf) - (-inf) must not be formed
    exps = torch.exp(scores - highest)
    total = exps.sum(-1, keepdim=True)
    return (exps / total.masked_fill(total == 0, 1.0)).to(x.dtype).contiguous()


def bwd(grad_out: Tensor, out: Tensor, scale: float) -> Tensor:
    """dx = scale * out * (grad_out - sum(grad_out * out)), contiguous, in out's dtype."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    grad, y = grad_out.to(dtype), out.to(dtype)
    dot = (grad * y).sum(-1, keepdim=True)
    return (scale * y * (grad - dot)).to(out.dtype).contiguous()


_NEG = float("-inf")
