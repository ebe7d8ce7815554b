"""The masks of ``MultiHeadAttention`` in the form that the attention function takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn._checks import parse_window


class AttentionMasks(NamedTuple):
    """Arguments of ``functional.scaled_dot_product_attention``."""

    attn_mask: Tensor | None  # [B or 1, H or 1, L, S]; bool: True may attend
    key_padding_mask: Tensor | None  # [B, S]; bool: True is padding
    is_causal: bool
    window: int | tuple[int, int] | None


def to_functional(attn_mask: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """[L, S] or [B * H, L, S], True = blocked -> [B or 1, H or 1, L, S], True = may attend."""
    if attn_mask is None:
        return None
    if attn_mask.dtype == torch.bool:
        attn_mask = ~attn_mask
    if attn_mask.dim() == 2:
        return attn_mask[None, None]
    return attn_mask.unflatten(0, (batch, heads))


def with_appended_keys(
    masks: AttentionMasks,
    appended: int,
    q_len: int,
    kv_len: int,
    causal_alignment: str,
    device: torch.device,
) -> AttentionMasks:
    """The same for ``appended`` more keys at the end, which every query sees.

    Causal and window, which know no exemption, become part of the mask.
    """
    mask, padding, is_causal, window = masks
    if is_causal or window is not None:
        diagonal = kv_len - q_len if causal_alignment == "bottom_right" else 0
        keep = _band(q_len, kv_len, diagonal, is_causal, window, device)
        if mask is None:
            mask = keep[None, None]
        elif mask.dtype == torch.bool:
            mask = mask & keep
        else:
            mask = mask.masked_fill(~keep, float("-inf"))
    if mask is not None:
        mask = F.pad(mask, (0, appended), value=mask.dtype == torch.bool)
    if padding is not None:
        padding = F.pad(padding, (0, appended))
    return AttentionMasks(mask, padding, is_causal=False, window=None)


def _band(
    q_len: int,
    kv_len: int,
    diagonal: int,
    is_causal: bool,
    window: int | tuple[int, int] | None,
    device: torch.device,
) -> Tensor:
    """Bool [L, S]: the keys around the diagonal that causal and window leave visible."""
    left, right = parse_window(window)
    if is_causal:
        right = 0
    keep = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if left >= 0:
        keep = keep.triu(diagonal - left)
    return keep.tril(diagonal + right) if right >= 0 else keep
