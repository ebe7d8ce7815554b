"""``patch_sdpa``: code that calls torch's scaled_dot_product_attention reaches fastattn's."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastattn import functional

_TORCHS = torch._C._nn.scaled_dot_product_attention
_NAME = _TORCHS.__name__
_lock = threading.Lock()
_depth = 0


@contextmanager
def patch_sdpa() -> Iterator[None]:
    """``torch.nn.functional.scaled_dot_product_attention`` is fastattn's inside the ``with`` block.

    For the whole process, in modules that imported the function under its own name too. Calls with
    nested tensors, or tensor subclasses that bring an attention of their own, still reach torch's.
    ``torch.nn.attention.bias`` masks work; ``torch.nn.attention.sdpa_kernel`` chooses nothing.

    Different on purpose: ``attn_mask`` and ``is_causal`` go together, rows that may attend to
    nothing are 0 rather than NaN, dropout draws other random numbers, and bad input raises
    TypeError or ValueError rather than RuntimeError.
    """
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            _rebind(_TORCHS, scaled_dot_product_attention)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _rebind(scaled_dot_product_attention, _TORCHS)


@functools.wraps(functional.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    arguments: dict[str, Any] = {}
    bias = _causal_bias(attn_mask)
    if bias is not None:
        lengths = (bias.seq_len_q, bias.seq_len_kv)
        if lengths != (query.shape[-2], key.shape[-2]):
            raise ValueError(
                f"attn_mask is a CausalBias of {lengths[0]} x {lengths[1]}; one of query's and "
                f"key's lengths, {query.shape[-2]} x {key.shape[-2]}, is accepted"
            )
        if bias.variant.name == "LOWER_RIGHT":
            arguments["causal_alignment"] = "bottom_right"
        attn_mask, is_causal = None, True
    tensors = (query, key, value, attn_mask)
    if torch.overrides.has_torch_function(tensors) or _any_nested(tensors):
        return _TORCHS(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **arguments
    )
    assert isinstance(output, Tensor)
    return output


def _causal_bias(mask: Tensor | None) -> Any:
    """The mask if it is torch's CausalBias, else None; without importing that module: seconds."""
    biases = sys.modules.get("torch.nn.attention.bias")
    return mask if biases is not None and isinstance(mask, biases.CausalBias) else None


def _any_nested(tensors: tuple[Tensor | None, ...]) -> bool:
    return any(isinstance(x, Tensor) and x.is_nested for x in tensors)


def _rebind(old: Any, new: Any) -> None:
    """``new`` in every imported module that has ``old`` under its own name; aliases are left."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        ours = getattr(module, "__name__", "").split(".")[0] == "fastattn"
        if names is not None and names is not torch._C._nn.__dict__ and not ours:
            if names.get(_NAME) is old:
                names[_NAME] = new
