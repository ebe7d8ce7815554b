"""torch's Transformer layers over fastattn's attention and fused residual, dropout and LayerNorm.

``replace_attention`` gives these classes to the layers of a model. Submodules, parameters and
arguments are torch's; masks reach the attention as they were given rather than made floating, and
torch's kernels for whole layers, which call no attention module, are never taken.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.transformer import _detect_is_causal_mask, _get_seq_len

from fastattn.functional import add_layer_norm


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """Figure 1, left, of Vaswani et al. 2017; ``norm_first`` puts LayerNorm before a sublayer."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        x = src
        attend = (self.self_attn, src_mask, src_key_padding_mask, is_causal)
        if self.norm_first:
            normed = add_norm(x, None, None, self.norm1)
            attended = _attend(normed, normed, *attend)
            normed, x = add_norm(attended, x, self.dropout1, self.norm2, return_sum=True)
            return x + self.dropout2(_feed_forward(self, normed))
        x = add_norm(_attend(x, x, *attend), x, self.dropout1, self.norm1)
        return add_norm(_feed_forward(self, x), x, self.dropout2, self.norm2)


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """Figure 1, right, of Vaswani et al. 2017; ``norm_first`` puts LayerNorm before a sublayer."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        x = tgt
        own = (self.self_attn, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        cross = (self.multihead_attn, memory_mask, memory_key_padding_mask, memory_is_causal)
        if self.norm_first:
            normed = add_norm(x, None, None, self.norm1)
            attended = _attend(normed, normed, *own)
            normed, x = add_norm(attended, x, self.dropout1, self.norm2, return_sum=True)
            attended = _attend(normed, memory, *cross)
            normed, x = add_norm(attended, x, self.dropout2, self.norm3, return_sum=True)
            return x + self.dropout3(_feed_forward(self, normed))
        x = add_norm(_attend(x, x, *own), x, self.dropout1, self.norm1)
        x = add_norm(_attend(x, memory, *cross), x, self.dropout2, self.norm2)
        return add_norm(_feed_forward(self, x), x, self.dropout3, self.norm3)


class TransformerEncoder(nn.TransformerEncoder):
    """The layers one after another; no nested tensors, so padded positions keep their place."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        x = src
        causal = _is_causal(self, src, mask, is_causal)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=causal, src_key_padding_mask=src_key_padding_mask)
        return x if self.norm is None else self.norm(x)


class TransformerDecoder(nn.TransformerDecoder):
    """The layers one after another; compiles whole with a mask too."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        x = tgt
        causal = _is_causal(self, tgt, tgt_mask, tgt_is_causal)
        for layer in self.layers:
            x = layer(
                x,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=causal,
                memory_is_causal=memory_is_causal,
            )
        return x if self.norm is None else self.norm(x)


def _is_causal(stack: Any, x: Tensor, mask: Tensor | None, given: bool | None) -> bool:
    """Whether the mask is known to be causal, which spares work: the mask is applied all the same.

    A compiler can't look into the mask.
    """
    if given is None and torch.compiler.is_compiling():
        return False
    batch_first = len(stack.layers) > 0 and stack.layers[0].self_attn.batch_first
    return _detect_is_causal_mask(mask, given, _get_seq_len(x, batch_first))


@overload
def add_norm(
    x: Tensor, residual: Tensor | None, dropout: nn.Module | None, norm: nn.Module
) -> Tensor: ...
@overload
def add_norm(
    x: Tensor,
    residual: Tensor | None,
    dropout: nn.Module | None,
    norm: nn.Module,
    return_sum: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def add_norm(
    x: Tensor,
    residual: Tensor | None,
    dropout: Any,
    norm: Any,
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """norm(residual + dropout(x)), fused where no hook and no other class would notice.

    The dtype is that of the sum, as in torch, also where autocast made x narrower.
    """
    if why_not_fused(norm, nn.LayerNorm) or (
        dropout is not None and why_not_fused(dropout, nn.Dropout)
    ):
        total = x if dropout is None else dropout(x)
        total = total if residual is None else residual + total
        return (norm(total), total) if return_sum else norm(total)
    if residual is not None and residual.dtype != x.dtype:
        x = x.to(torch.promote_types(x.dtype, residual.dtype))
    return add_layer_norm(
        x,
        residual,
        norm.weight,
        norm.bias,
        dropout_p=dropout.p if dropout is not None and dropout.training else 0.0,
        eps=norm.eps,
        return_sum=return_sum,
    )


def why_not_fused(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Why a module has to be called itself, asked at each call: hooks may come later."""
    if type(module) is not kind:
        return f"is a {type(module).__name__}"
    if has_hooks(module):
        return "has hooks"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != 1:
        return "normalizes several dimensions"
    return None


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _attend(
    x: Tensor,
    memory: Tensor,
    attention: nn.Module,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
) -> Tensor:
    return attention(
        x,
        memory,
        memory,
        attn_mask=mask,
        key_padding_mask=padding,
        need_weights=False,
        is_causal=is_causal,
    )[0]


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    return layer.linear2(layer.dropout(layer.activation(layer.linear1(x))))
