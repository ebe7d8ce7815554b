"""The public functions of fastattn. Semantics that hold for all of them:

A query that may attend to nothing gives output 0, weights 0, log-sum-exp -inf and gradients 0.
Scores, softmax and sums are computed in float32 (float64 for float64 inputs) and rounded once.
``rng_state`` (int64 [2]: seed, offset, on the input's device) fixes a dropout mask; None draws one
from torch's default generator. ``dropout_p`` is applied as given: functions know no ``training``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastattn._autocast import cast_mask_to_autocast, cast_to_autocast, cast_to_float32
from fastattn._checks import (
    check_bool,
    check_floating,
    check_int,
    check_mask_kind,
    check_number,
    check_probability,
    is_bottom_right,
    parse_window,
)
from fastattn._dispatch import requested
from fastattn._philox import draw_rng_state
from fastattn.ops import attention as _attention
from fastattn.ops import cross_entropy as _cross_entropy
from fastattn.ops import dropout as _dropout
from fastattn.ops import layer_norm as _layer_norm
from fastattn.ops import softmax as _softmax
from fastattn.ops.attention import (
    add_to_mask,
    check_heads,
    check_scalars,
    default_scale,
    to_four_dims,
)

__all__ = [
    "AttentionOutput",
    "add_layer_norm",
    "dropout",
    "linear_cross_entropy",
    "scaled_dot_product_attention",
    "softmax",
    "varlen_attention",
]


class AttentionOutput(NamedTuple):
    """What attention returns with ``return_lse`` or ``return_weights``; the rest is None."""

    output: Tensor
    lse: Tensor | None = None
    weights: Tensor | None = None


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_padding_mask: Tensor | None = None,
    causal_alignment: str = "top_left",
    window: int | tuple[int, int] | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor | AttentionOutput:
    """dropout(softmax(scale * Q K^T + mask)) V  (Vaswani et al. 2017, section 3.2.1).

    The first eight arguments are those of ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: [..., Hq, Lq, Dk], floating; leading dimensions broadcast.
        key: [..., Hk, Lk, Dk].
        value: [..., Hk, Lk, Dv]; Dv may differ from Dk.
        attn_mask: broadcastable to [..., Hq, Lq, Lk]. bool: True may attend. Floating (the query's
            dtype or float32): added to the scaled scores; differentiable.
        dropout_p: probability that a weight is dropped; kept ones are multiplied by 1 / (1 - p).
        is_causal: query i sees no key after the diagonal; combined with every mask given.
        scale: default 1 / sqrt(Dk).
        enable_gqa: Hq may be a multiple of Hk; query head h reads key head h // (Hq / Hk).
        key_padding_mask: [B, Lk]. bool: True is padding, ignored. Floating: added to that key's
            scores.
        causal_alignment: "top_left" (as torch) or "bottom_right", for causal and window, where
            Lq != Lk. Padding does not move the diagonal.
        window: (left, right): key j is visible to query i if i - left <= j <= i + right on the
            diagonal; an int r means (r, r); -1 is unlimited on its side.
        return_lse: also return the log-sum-exp of the scores, float32 [..., Hq, Lq].
        return_weights: also return the attention weights after dropout, [..., Hq, Lq, Lk].
        rng_state: see the module's docstring.

    Returns:
        [..., Hq, Lq, Dv] in the query's dtype; an ``AttentionOutput`` with ``return_lse`` or
        ``return_weights``. All three are differentiable.

    Raises:
        TypeError, ValueError: in one sentence that names the argument.
        BackendError: if a backend was forced that can't run the call.
    """
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if mask is not None:
            check_mask_kind(name, mask)
    query, key, value = cast_to_autocast(query, key, value)
    attn_mask = cast_mask_to_autocast(attn_mask, query)
    query, key, value, attn_mask, batch_shape = to_four_dims(query, key, value, attn_mask)
    check_heads(query, key, enable_gqa)
    if key_padding_mask is not None and key_padding_mask.dtype != torch.bool:
        attn_mask, key_padding_mask = add_to_mask(attn_mask, key_padding_mask, query, key), None
    check_scalars(dropout_p, is_causal, scale)
    if dropout_p > 0 and rng_state is None:
        rng_state = draw_rng_state(query.device)
    left, right = parse_window(window)
    output, lse, _, weights = _attention.attention(
        query, key, value, attn_mask, key_padding_mask, rng_state,
        default_scale(query) if scale is None else scale, is_causal,
        is_bottom_right(causal_alignment), left, right, dropout_p, return_weights, return_lse,
        requested(),
    )  # fmt: skip
    if batch_shape is not None:
        output = output.reshape(*batch_shape, *output.shape[-2:])
        lse = lse.reshape(*batch_shape, lse.shape[-1])
        if return_weights:
            weights = weights.reshape(*batch_shape, *weights.shape[-2:])
    if not (return_lse or return_weights):
        return output
    return AttentionOutput(output, lse if return_lse else None, weights if return_weights else None)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor | AttentionOutput:
    """Attention within each of B sequences packed one after another, without padding.

    Args:
        query: [Tq, Hq, Dk]: sequence b owns the rows ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]``.
        key: [Tk, Hk, Dk].
        value: [Tk, Hk, Dv].
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1], from 0 to Tq and Tk; sequences may be empty.
        max_seqlen_q, max_seqlen_k: the longest lengths, if known; default: Tq and Tk.
        causal_alignment: of each sequence's own lengths; here the default is "bottom_right".
        dropout_p, is_causal, window, scale, enable_gqa, rng_state: as
            ``scaled_dot_product_attention``.
        return_lse: also return the log-sum-exp, float32 [Hq, Tq].

    Returns:
        [Tq, Hq, Dv] in the query's dtype; an ``AttentionOutput`` with ``return_lse``.

    Raises:
        TypeError, ValueError: in one sentence that names the argument.
    """
    query, key, value = cast_to_autocast(query, key, value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_floating(name, x)
    if query.dim() == 3 and key.dim() == 3:
        check_heads(query, key, enable_gqa)
    check_scalars(dropout_p, is_causal, scale)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if length is not None:
            check_int(name, length)
    if dropout_p > 0 and rng_state is None:
        rng_state = draw_rng_state(query.device)
    left, right = parse_window(window)
    output, lse, _ = _attention.varlen_attention(
        query, key, value, cu_seqlens_q, cu_seqlens_k, rng_state,
        default_scale(query) if scale is None else scale, is_causal,
        is_bottom_right(causal_alignment), left, right, dropout_p,
        query.shape[0] if max_seqlen_q is None else max_seqlen_q,
        key.shape[0] if max_seqlen_k is None else max_seqlen_k,
        requested(),
    )  # fmt: skip
    return AttentionOutput(output, lse) if return_lse else output


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
    return_sum: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm(residual + dropout(x)) over the last dimension (Vaswani et al. 2017, section 5.4).

    Args:
        x: [..., N], floating.
        residual: x's shape, or None for LayerNorm(dropout(x)); its dtype may differ from x's.
        weight, bias: [N], or None; float32 is accepted beside half inputs.
        dropout_p: applied to x, before the sum.
        eps: added to the biased variance.
        return_sum: also return residual + dropout(x), as pre-norm blocks need, in the wider dtype.
        rng_state: see the module's docstring.

    Returns:
        [..., N] in x's dtype, or (that, sum) with ``return_sum``. Both are differentiable.

    Raises:
        TypeError, ValueError: in one sentence that names the argument.
    """
    x, residual, weight, bias = cast_to_float32(x, residual, weight, bias)
    check_floating("x", x)
    check_probability("dropout_p", dropout_p)
    check_number("eps", eps, least=0.0)
    if dropout_p > 0 and rng_state is None:
        rng_state = draw_rng_state(x.device)
    return _layer_norm.add_layer_norm(
        x, residual, weight, bias, rng_state, dropout_p, eps, return_sum, requested()
    )


def softmax(
    x: Tensor, *, mask: Tensor | None = None, is_causal: bool = False, scale: float = 1.0
) -> Tensor:
    """softmax(scale * x + mask) over the last dimension; a row with no visible entry gives zeros.

    Args:
        x: [..., L, S] (a vector [S] without ``is_causal``), floating.
        mask: broadcastable to x. bool: True is kept. Floating: added after scaling; differentiable.
        is_causal: entry j of row i is visible if j <= i.
        scale: multiplies x.

    Returns:
        x's shape and dtype.

    Raises:
        TypeError, ValueError: in one sentence that names the argument.
    """
    if mask is not None:
        check_mask_kind("mask", mask)
    check_bool("is_causal", is_causal)
    check_number("scale", scale)
    x, mask = cast_to_float32(x, mask)
    return _softmax.softmax(x, mask, is_causal, scale, requested())


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
    ignore_index: int = -100,
    reduction: str = "mean",
    return_nll: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """cross_entropy(hidden @ weight^T + bias, target), the logits never kept whole.

    Args:
        hidden: [..., D], floating.
        weight: [V, D]; hidden's dtype.
        target: [...] int64 class indices, or ``ignore_index``.
        bias: [V] or None.
        class_weight: [V] or None; weighs each class as in ``torch.nn.functional.cross_entropy``.
        label_smoothing: eps, from 0 to 1.
        smoothing: "uniform" (as torch: every class gets eps / V, the target 1 - eps more) or
            "exclusive" (as the paper's authors: the target gets 1 - eps, each other class
            eps / (V - 1)).
        ignore_index: tokens with this target count for nothing.
        reduction: "mean" (over the weights of the tokens that count; NaN if none counts, as torch),
            "sum" or "none".
        return_nll: also return the un-smoothed loss, by the same reduction, without gradient.

    Returns:
        A float32 scalar (float64 for float64 inputs), or [...] for reduction "none"; with
        ``return_nll`` a pair of them.

    Raises:
        TypeError, ValueError: in one sentence that names the argument.
        IndexError: for a target outside 0 .. V - 1 that is not ``ignore_index`` (checked on CPU).
    """
    check_int("ignore_index", ignore_index)
    hidden, weight, bias = cast_to_autocast(hidden, weight, bias)
    return _cross_entropy.linear_cross_entropy(
        hidden, weight, target, bias, class_weight, label_smoothing, smoothing, ignore_index,
        reduction, return_nll, requested(),
    )  # fmt: skip


def dropout(x: Tensor, p: float, *, rng_state: Tensor | None = None) -> Tensor:
    """x with each element zeroed with probability p, the others times 1 / (1 - p).

    Args:
        x: any shape, floating.
        p: from 0 to 1.
        rng_state: see the module's docstring.

    Raises:
        TypeError, ValueError: in one sentence that names the argument.
    """
    check_floating("x", x)
    check_probability("p", p)
    if p == 0:
        return x
    return _dropout.dropout(
        x, draw_rng_state(x.device) if rng_state is None else rng_state, p, requested()
    )
