"""Attention by torch's own fused op, with the rows mended that it gets wrong.

Used where no kernel of ours runs. torch keeps no log-sum-exp for us, so the backward runs its
forward again; its dropout is not our Philox, so calls with dropout are left to the reference.

torch's fused backward keeps the log-sum-exp in one float32, which gives gradients wrong by whole
factors for scores of 1e7 and rows of finfo.min. On CPUs, where scores fit into memory, the
backward is therefore the reference's; on GPUs it is torch's, with that limit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn._library import recording
from fastattn.ops.attention import reference
from fastattn.ops.attention.reference import AttentionConfig, empty_output, visible

# Where torch.nn.functional has it from; its name there may mean fastattn's (patch_sdpa).
_torchs_attention = torch._C._nn.scaled_dot_product_attention


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    rng_state: Tensor | None,
    cfg: AttentionConfig,
) -> str | None:
    if cfg.dropout_p > 0:
        return "dropout_p > 0: torch draws another mask than the common Philox"
    if cfg.return_weights:
        return "return_weights: torch's fused attention keeps no weights"
    if cfg.need_lse:
        return "return_lse: torch's public attention keeps no log-sum-exp"
    if query.dtype == torch.float64:
        return "float64: the reference keeps its accuracy"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        return "a float32 attn_mask with half inputs: torch rounds it to the inputs' dtype"
    if 0 in query.shape or 0 in value.shape:
        return "an empty tensor: nothing to fuse"
    return None


def fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    rng_state: Tensor | None,
    cfg: AttentionConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference; the log-sum-exp, which nobody asked for, is +inf, as no row's can be."""
    output = empty_output(query, value)
    output.copy_(_attend(query, key, value, attn_mask, key_padding_mask, cfg))
    lse = query.new_full(query.shape[:3], float("inf"), dtype=torch.float32)
    return output, lse, lse.clone(), query.new_empty(0)


def bwd(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    rng_state: Tensor | None,
    output: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    cfg: AttentionConfig,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    inputs = (query, key, value, attn_mask)
    if query.is_cpu or grad_lse is not None:  # the latter comes from second derivatives alone
        lse, lse_low = reference.log_sum_exp(query, key, attn_mask, key_padding_mask, cfg)
        return reference.bwd(
            grad_output,
            grad_lse,
            grad_weights,
            *inputs,
            key_padding_mask,
            rng_state,
            output,
            lse,
            lse_low,
            cfg,
            needs,
        )
    leaves = [
        None if x is None else x.detach().requires_grad_(need)
        for x, need in zip(inputs, needs, strict=True)
    ]
    with recording():
        again = _attend(*leaves, key_padding_mask, cfg)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(again, wanted, grad_output))
    grads = [None if x is None or not x.requires_grad else next(found) for x in leaves]
    for i, (grad, like) in enumerate(zip(grads[:3], inputs[:3], strict=True)):
        if grad is not None:
            grads[i] = empty_output(like, like).copy_(grad)
    if grads[3] is not None:
        grads[3] = grads[3].contiguous()
    return tuple(grads)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    cfg: AttentionConfig,
) -> Tensor:
    plain_causal = cfg.is_causal and not cfg.bottom_right
    windowed = cfg.window_left >= 0 or cfg.window_right >= 0
    gqa = query.shape[1] != key.shape[1]
    if attn_mask is None and key_padding_mask is None and not windowed:
        if plain_causal or not cfg.is_causal:
            return _torchs_attention(
                query, key, value, is_causal=plain_causal, scale=cfg.scale, enable_gqa=gqa
            )
    mask, sees = _merge_masks(query, key, attn_mask, key_padding_mask, cfg)
    if key_padding_mask is not None:
        hidden = key_padding_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    output = _torchs_attention(query, key, value, attn_mask=mask, scale=cfg.scale, enable_gqa=gqa)
    return output.masked_fill(~sees, 0.0)


def _merge_masks(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    cfg: AttentionConfig,
) -> tuple[Tensor, Tensor]:
    """One mask for torch, and bool [..., Lq, 1] of rows that see a key; other rows are opened."""
    keep = visible(query.shape[2], key.shape[2], cfg, query.device)
    if key_padding_mask is not None:
        unpadded = ~key_padding_mask[:, None, None, :]
        keep = unpadded if keep is None else keep & unpadded
    additive = None
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool:
            additive = attn_mask.to(query.dtype)
            allowed = attn_mask.detach() != float("-inf")
        else:
            allowed = attn_mask
        keep = allowed if keep is None else keep & allowed
    assert keep is not None
    sees = keep.any(-1, keepdim=True)
    if additive is None:
        return keep | ~sees, sees
    return torch.where(sees, additive.masked_fill(~keep, float("-inf")), 0.0), sees
