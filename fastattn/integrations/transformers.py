"""Hugging Face transformers on fastattn.

    import fastattn.integrations.transformers
    model = AutoModel.from_pretrained(name, attn_implementation="fastattn")

or ``model.set_attn_implementation("fastattn")``. Importing this module registers the name with
transformers (5.0 or newer), for every model that takes its attention from ``AttentionInterface``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastattn.functional import scaled_dot_product_attention

NAME = "fastattn"
_UNSUPPORTED = {
    "softcap": "scores capped by a tanh (Gemma 2)",
    "s_aux": "attention sinks (GPT-OSS)",
}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function that transformers calls; see its ``AttentionInterface``.

    Args:
        module: the attention module; its ``is_causal`` holds where the argument is None.
        query: [B, H, Lq, D].
        key, value: [B, Hkv, Lk, D]; query head h reads key head h // (H / Hkv).
        attention_mask: broadcastable to [B, H, Lq, Lk]. bool: True may attend. Floating: added to
            the scores. With it ``is_causal`` is not asked, as transformers means it.
        dropout: of the attention weights, 0 unless the module trains.
        scaling: of the scores; default 1 / sqrt(D).
        position_bias: [1 or B, H, Lq, Lk], added to the scores (T5).
        kwargs: of them ``output_attentions=True`` asks for the weights.

    Returns:
        The output [B, Lq, H, D], and the weights after dropout [B, H, Lq, Lk] or None.

    Raises:
        ValueError: for a kind of attention that fastattn has not.
    """
    for name, what in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} is given: {what}; a model without is accepted, or another "
                'attn_implementation, as "eager"'
            )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    # One query stands at the end of the keys that a cache kept, not at the top left.
    causal = query.shape[2] > 1 and attention_mask is None and causal
    attended = scaled_dot_product_attention(
        query,
        key,
        value,
        _with_bias(attention_mask, position_bias),
        dropout,
        causal,
        scaling,
        enable_gqa=True,
        return_weights=bool(kwargs.get("output_attentions")),
    )
    if isinstance(attended, Tensor):
        return attended.transpose(1, 2).contiguous(), None
    return attended.output.transpose(1, 2).contiguous(), attended.weights


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if mask is None or bias is None:
        return bias if mask is None else mask
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    return mask + bias


def register() -> None:
    """Make ``attn_implementation="fastattn"`` known; importing the module has done so.

    Raises:
        ImportError: if transformers is not installed, or is older than 5.0.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            "fastattn.integrations.transformers needs transformers 5.0 or newer: "
            f"pip install 'fastattn[integrations]' ({error})"
        ) from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


register()
