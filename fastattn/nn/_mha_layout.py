"""Between a module's sequences [B, L, E] or [L, B, E] and the heads [B, H, L, D] of attention."""

from __future__ import annotations

import torch
from torch import Tensor


def add_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each [1, L, E]; what was one tensor stays one, for the packed projections."""
    q = query.unsqueeze(0)
    k = q if key is query else key.unsqueeze(0)
    v = k if value is key else value.unsqueeze(0)
    return q, k, v


def split_heads(x: Tensor, heads: int, seq_first: bool = False) -> Tensor:
    """[B, L, H D] or [L, B, H D] -> [B, H, L, D], a view."""
    first, second, width = x.shape
    x = x.view(first, second, heads, width // heads)
    return x.permute(1, 2, 0, 3) if seq_first else x.transpose(1, 2)


def concatenate_heads(context: Tensor, seq_first: bool) -> Tensor:
    """[B, H, L, D] -> [B, L, H D], for backends' outputs a view, or [L, B, H D]."""
    x = context.permute(2, 0, 1, 3) if seq_first else context.transpose(1, 2)
    return x.flatten(2)


def append_position(x: Tensor, bias: Tensor) -> Tensor:
    """x [B, H, S, D] with ``bias`` [1, 1, H D] as one more position of every sequence."""
    batch, heads, _, width = x.shape
    last = bias.to(x.dtype).view(1, heads, 1, width).expand(batch, heads, 1, width)
    return torch.cat([x, last], 2)
