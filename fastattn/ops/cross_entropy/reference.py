"""Cross entropy of hidden @ weight^T + bias in plain PyTorch, logits and all.

With class weights w (default 1), V classes, target t and -log p = lse - z for logits z:

    loss_i = a w_t (-log p_t) + b sum_c w_c (-log p_c)
    uniform smoothing (torch):               a = 1 - eps,                   b = eps / V
    exclusive smoothing (Vaswani et al.):    a = 1 - eps - eps / (V - 1),   b = eps / (V - 1)
    dloss_i / dz_c = (a w_t + b sum w) p_c - a w_t [c = t] - b w_c

"mean" divides the sum by the sum of w_t over the tokens that count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class CrossEntropyConfig(NamedTuple):
    label_smoothing: float
    exclusive: bool
    ignore_index: int
    reduction: str  # "none", "mean" or "sum"


def why_not(*_: object) -> str | None:
    return None


def fwd(
    hidden: Tensor,  # [T, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    class_weight: Tensor | None,  # [V]
    target: Tensor,  # int64 [T]
    cfg: CrossEntropyConfig,
    needs: tuple[bool, bool, bool],  # gradients of hidden, weight, bias
) -> tuple[Tensor, ...]:
    """(loss, nll, lse [T], dhidden, dweight, dbias).

    The gradients are those of ``loss`` and come with reductions "mean" and "sum" alone; they are
    empty otherwise, and where not needed.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    lse = torch.logsumexp(logits, -1)
    counts = target != cfg.ignore_index
    safe_target = target.masked_fill(~counts, 0).unsqueeze(-1)
    w = logits.new_ones(logits.shape[-1]) if class_weight is None else class_weight.to(dtype)
    target_weight = w[safe_target.squeeze(-1)] * counts
    log_probs, loss, nll = losses(logits, w, safe_target, target_weight, counts, cfg)
    divisor = target_weight.sum() if cfg.reduction == "mean" else None
    if cfg.reduction == "none":
        return loss, nll, lse, *(hidden.new_empty(0) for _ in range(3))

    factor = counts.to(dtype) if divisor is None else counts / divisor
    grads = logits_gradient(log_probs, w, safe_target, target_weight, cfg) * factor.unsqueeze(-1)
    grads = grads.masked_fill(~counts.unsqueeze(-1), 0.0)
    found = _input_gradients(grads, hidden, weight, bias, needs)
    filled = (hidden.new_empty(0) if g is None else g for g in found)
    return reduce(loss, divisor), reduce(nll, divisor), lse, *filled


def bwd(
    grad_loss: Tensor,  # [T]
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    target: Tensor,
    lse: Tensor,
    cfg: CrossEntropyConfig,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients for reduction "none", the logits computed again."""
    dtype = lse.dtype
    logits = hidden.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    counts = target != cfg.ignore_index
    safe_target = target.masked_fill(~counts, 0).unsqueeze(-1)
    w = logits.new_ones(logits.shape[-1]) if class_weight is None else class_weight.to(dtype)
    target_weight = w[safe_target.squeeze(-1)] * counts
    log_probs = torch.log_softmax(logits, -1)
    grads = logits_gradient(log_probs, w, safe_target, target_weight, cfg)
    grads = grads * (grad_loss.to(dtype) * counts).unsqueeze(-1)
    return _input_gradients(grads, hidden, weight, bias, needs)


def smoothing_terms(cfg: CrossEntropyConfig, classes: int) -> tuple[float, float]:
    """(a, b) of the formula above."""
    eps = cfg.label_smoothing
    if not cfg.exclusive:
        return 1.0 - eps, eps / max(classes, 1)
    other = eps / (classes - 1) if classes > 1 else 0.0
    return 1.0 - eps - other, other


def losses(
    logits: Tensor,  # [T, V]
    w: Tensor,  # [V]
    safe_target: Tensor,  # [T, 1]
    target_weight: Tensor,  # [T]
    counts: Tensor,  # [T]
    cfg: CrossEntropyConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log p [T, V], loss [T], nll [T]), before reduction.

    log p is (z - max z) - log sum exp(z - max z): with logits of 1e7 the two parts of the
    log-sum-exp in one number would leave no bits for the logarithm.
    """
    a, b = smoothing_terms(cfg, logits.shape[-1])
    log_probs = torch.log_softmax(logits, -1)
    nll = -target_weight * log_probs.gather(-1, safe_target).squeeze(-1)
    nll = nll.masked_fill(~counts, 0.0)
    loss = a * nll
    if b:
        loss = loss - (b * (log_probs @ w)).masked_fill(~counts, 0.0)
    return log_probs, loss, nll


def logits_gradient(
    log_probs: Tensor,  # [T, V]
    w: Tensor,  # [V]
    safe_target: Tensor,  # [T, 1]
    target_weight: Tensor,  # [T]
    cfg: CrossEntropyConfig,
) -> Tensor:
    """dloss_i / dz_c, before reduction: [T, V]."""
    a, b = smoothing_terms(cfg, log_probs.shape[-1])
    scaled_weight = (a * target_weight).unsqueeze(-1)
    grads = (scaled_weight + b * w.sum()) * torch.exp(log_probs)
    grads = grads - b * w
    return grads.scatter_add(-1, safe_target, -scaled_weight)


def reduce(per_token: Tensor, divisor: Tensor | None) -> Tensor:
    total = per_token.sum()
    return total if divisor is None else total / divisor


def _input_gradients(
    grad_logits: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dtype = grad_logits.dtype
    grad_hidden = grad_weight = grad_bias = None
    if needs[0]:
        grad_hidden = (grad_logits @ weight.to(dtype)).to(hidden.dtype)
    if needs[1]:
        grad_weight = (grad_logits.T @ hidden.to(dtype)).to(weight.dtype)
    if needs[2] and bias is not None:
        grad_bias = grad_logits.sum(0).to(bias.dtype)
    return grad_hidden, grad_weight, grad_bias
