"""Plain PyTorch for every op, in its inputs' dtype: the peer and, in float64, the exact answer.

Written apart from the references in ``fastattn/ops`` and by other means (torch.softmax,
F.layer_norm, F.cross_entropy, whole masks, autograd for every gradient), so that a slip in one
shows in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse, weights) for [B, H, L, D]; ``keep`` [B, H, Lq, Lk] is dropout's mask."""
    heads, q_len, kv_len = query.shape[1], query.shape[2], key.shape[2]
    if key_padding_mask is not None:
        hidden = key_padding_mask[:, None, :, None]
        key = torch.where(hidden, torch.zeros_like(key), key)
        value = torch.where(hidden, torch.zeros_like(value), value)
    if key.shape[1] != heads:
        owner = torch.arange(heads, device=query.device) // (heads // key.shape[1])
        key, value = key[:, owner], value[:, owner]
    scale = (query.shape[-1] or 1) ** -0.5 if scale is None else scale
    scores = torch.einsum("bhqd,bhkd->bhqk", query * scale, key)
    seen = attention_pattern(q_len, kv_len, is_causal, causal_alignment, window).to(query.device)
    seen = seen.expand(scores.shape)
    if key_padding_mask is not None:
        seen = seen & ~key_padding_mask[:, None, None, :]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        seen = seen & (attn_mask != -torch.inf)
        scores = scores + attn_mask.to(scores.dtype)
    alive = seen.any(-1, keepdim=True)
    scores = torch.where(seen, scores, torch.where(alive, -torch.inf, 0.0).to(scores.dtype))
    weights = torch.where(alive, torch.softmax(scores, -1), 0.0)
    top = scores.detach().amax(-1, keepdim=True) if kv_len else scores.new_zeros(())
    lse = torch.logsumexp(scores - top, -1) + top.reshape(alive.shape[:-1] if kv_len else ())
    lse = torch.where(alive[..., 0], lse, -torch.inf)
    if keep is not None:
        weights = torch.where(keep, weights / (1 - dropout_p) if dropout_p < 1 else weights, 0.0)
    return weights @ value, lse, weights


def attention_pattern(
    q_len: int,
    kv_len: int,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window: int | tuple[int, int] | None = None,
) -> Tensor:
    """Bool [Lq, Lk]: which keys causal and window leave to each query, entry by entry."""
    left, right = (window, window) if isinstance(window, int) else window or (-1, -1)
    shift = kv_len - q_len if causal_alignment == "bottom_right" else 0
    after = torch.arange(kv_len) - (torch.arange(q_len)[:, None] + shift)  # j - i on the diagonal
    seen = torch.ones_like(after, dtype=torch.bool)
    if is_causal:
        seen &= after <= 0
    if left >= 0:
        seen &= after >= -left
    if right >= 0:
        seen &= after <= right
    return seen


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    keeps: list[Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(output [Tq, H, Dv], lse [H, Tq]); ``keeps``: dropout's masks [1, H, Lq, Lk] by sequence."""
    outputs, sums = [], []
    ends = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    start_q = start_k = 0
    for b, (end_q, end_k) in enumerate(ends, start=-1):  # the first, of length 0, gives the shapes
        q = query[start_q:end_q].transpose(0, 1)[None]
        k, v = (x[start_k:end_k].transpose(0, 1)[None] for x in (key, value))
        keep = keeps[b] if keeps is not None and b >= 0 else None
        out, lse, _ = attention(q, k, v, keep=keep, **options)
        outputs.append(out[0].transpose(0, 1))
        sums.append(lse[0])
        start_q, start_k = end_q, end_k
    return torch.cat(outputs), torch.cat(sums, -1)


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out, sum); ``keep`` has x's shape."""
    branch = x
    if keep is not None:
        branch = torch.where(keep, x / (1 - dropout_p) if dropout_p < 1 else x, 0.0)
    total = branch if residual is None else branch + residual
    wide = total.dtype
    weight = None if weight is None else weight.to(wide)
    bias = None if bias is None else bias.to(wide)
    return F.layer_norm(total, total.shape[-1:], weight, bias, eps).to(x.dtype), total


def softmax(
    x: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float = 1.0
) -> Tensor:
    scores = x * scale
    seen = torch.ones(scores.shape, dtype=torch.bool, device=x.device)
    if is_causal:
        seen = seen.tril()
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        seen = seen & (mask != -torch.inf)
        scores = scores + mask.to(scores.dtype)
    alive = seen.any(-1, keepdim=True)
    scores = torch.where(seen, scores, torch.where(alive, -torch.inf, 0.0).to(scores.dtype))
    return torch.where(alive, torch.softmax(scores, -1), 0.0)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
    ignore_index: int = -100,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    """(loss, nll); exclusive smoothing is torch's with an eps of eps V / (V - 1)."""
    logits = F.linear(hidden, weight, None if bias is None else bias.to(hidden.dtype))
    class_weight = None if class_weight is None else class_weight.to(hidden.dtype)
    classes = weight.shape[0]
    eps = label_smoothing
    if smoothing == "exclusive":
        eps = label_smoothing * classes / (classes - 1) if classes > 1 else 0.0

    def loss(eps: float) -> Tensor:
        return F.cross_entropy(
            logits.reshape(-1, classes),
            target.reshape(-1),
            class_weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=eps,
        )

    nll = loss(0.0)
    if eps <= 1.0:
        return loss(eps), nll
    return nll + eps * (loss(1.0) - nll), nll


def gradients(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: tuple[Tensor | None, ...],
    grad_outputs: tuple[Tensor | None, ...],
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """(outputs, gradients of the floating inputs, None for the others) of ``function(*inputs)``.

    Outputs whose entry of ``grad_outputs`` is None take no part; an input without part gets zeros.
    """
    leaves = tuple(
        x.detach().requires_grad_() if x is not None and x.is_floating_point() else x
        for x in inputs
    )
    outputs = function(*leaves)
    pairs = [(o, g) for o, g in zip(outputs, grad_outputs, strict=True) if g is not None]
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    outs, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, wanted, grads, materialize_grads=True))
    given = tuple(next(found) if x is not None and x.requires_grad else None for x in leaves)
    return tuple(o.detach() for o in outputs), given
