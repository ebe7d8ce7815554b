"""What ``MultiHeadAttention`` accepts, said in the words of its own arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastattn._autocast import is_enabled
from fastattn._checks import (
    check_count,
    check_device,
    check_floating,
    check_probability,
    describe,
    is_bottom_right,
    parse_window,
)

if TYPE_CHECKING:
    from fastattn.nn.multi_head_attention import MultiHeadAttention


def check_arguments(
    embed_dim: int,
    num_heads: int,
    dropout: float,
    kdim: int | None,
    vdim: int | None,
    num_kv_heads: int | None,
    window: int | tuple[int, int] | None,
    head_dim: int | None,
    v_head_dim: int | None,
    causal_alignment: str,
) -> None:
    """Those of the constructor."""
    check_count("embed_dim", embed_dim)
    check_count("num_heads", num_heads)
    optional = {
        "kdim": kdim,
        "vdim": vdim,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
    }
    for name, number in optional.items():
        if number is not None:
            check_count(name, number)
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(
            f"embed_dim is {embed_dim} with num_heads {num_heads}; a multiple of num_heads is "
            "accepted, or any number with head_dim"
        )
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads is {num_kv_heads} with num_heads {num_heads}; a divisor of num_heads is "
            "accepted"
        )
    check_probability("dropout", dropout)
    parse_window(window)
    is_bottom_right(causal_alignment)


def check_inputs(
    module: MultiHeadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> None:
    """Those of ``forward``."""
    weight = _first_weight(module)
    _check_sequence("query", query, module.embed_dim, weight)
    if query.dim() not in (2, 3):
        raise ValueError(f"query is {describe(query)}; {_layout(module, 'L', 'E')} is accepted")
    if key is not query:
        _check_key("key", key, module, query, module.kdim, weight)
    if value is not key:
        _check_key("value", value, module, query, module.vdim, weight)
        if value.shape[:-1] != key.shape[:-1]:
            raise ValueError(
                f"value is {describe(value)} but key is {describe(key)}; "
                "the same length and batch size is accepted"
            )
    batch, q_len, kv_len = 1, query.shape[0], key.shape[0]
    if query.dim() == 3:
        seq = 1 if module.batch_first else 0
        batch, q_len, kv_len = query.shape[1 - seq], query.shape[seq], key.shape[seq]
        if key.shape[1 - seq] != batch:
            raise ValueError(
                f"key is {describe(key)} but query is {describe(query)}; the same batch size "
                f"(dimension {1 - seq} with batch_first={module.batch_first}) is accepted"
            )
    if key_padding_mask is not None:
        shape = (batch, kv_len) if query.dim() == 3 else (kv_len,)
        words = "[B, S]" if query.dim() == 3 else "[S]"
        _check_mask("key_padding_mask", key_padding_mask, query, {words: shape})
    if attn_mask is not None:
        heads = batch * module.num_heads
        shapes = {"[L, S]": (q_len, kv_len), "[B * H, L, S]": (heads, q_len, kv_len)}
        _check_mask("attn_mask", attn_mask, query, shapes)


def check_sequence(
    module: MultiHeadAttention, name: str, x: Tensor, letter: str, width: int
) -> None:
    """``x`` as the batch-first helpers take it."""
    _check_sequence(name, x, width, _first_weight(module))
    if x.dim() != 3:
        raise ValueError(f"{name} is {describe(x)}; [B, L, {letter}] is accepted")


def _check_key(
    name: str, x: Tensor, module: MultiHeadAttention, query: Tensor, width: int, weight: Tensor
) -> None:
    _check_sequence(name, x, width, weight)
    if x.dim() != query.dim():
        raise ValueError(
            f"{name} is {describe(x)} but query is {describe(query)}; both batched, "
            f"{_layout(module, 'S', f'{name[0]}dim')}, or both unbatched is accepted"
        )


def _first_weight(module: MultiHeadAttention) -> Tensor:
    return module.q_proj_weight if module.in_proj_weight is None else module.in_proj_weight


def _layout(module: MultiHeadAttention, length: str, width: str) -> str:
    batched = f"[B, {length}, {width}]" if module.batch_first else f"[{length}, B, {width}]"
    return f"{batched} or [{length}, {width}]"


def _check_sequence(name: str, x: Tensor, width: int, weight: Tensor) -> None:
    """Dtype, device and last dimension, against the module's parameters."""
    check_floating(name, x)
    if x.is_nested:
        raise TypeError(
            f"{name} is a nested tensor; a padded one with key_padding_mask is accepted, and "
            "fastattn.varlen_attention takes packed sequences"
        )
    if x.dim() < 1 or x.shape[-1] != width:
        raise ValueError(f"{name} is {describe(x)}; a last dimension of {width} is accepted")
    if x.dtype != weight.dtype and not is_enabled(x.device.type):
        raise TypeError(
            f"{name} is {describe(x)} but the module is {describe(weight)}; the same dtype is "
            "accepted, and any with autocast"
        )
    check_device(name, x, "the module", weight)


def _check_mask(name: str, mask: Tensor, query: Tensor, shapes: dict[str, tuple[int, ...]]) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"{name} is {describe(mask)}; a bool or floating-point tensor is accepted")
    check_device(name, mask, "query", query)
    if tuple(mask.shape) not in shapes.values():
        accepted = " or ".join(f"{words} = {shape}" for words, shape in shapes.items())
        raise ValueError(f"{name} is {describe(mask)}; {accepted} is accepted")
