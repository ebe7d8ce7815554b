"""Cross entropy of linear logits on the CPU, by the SIMD kernels of csrc/cross_entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _native
from fastattn.ops.cross_entropy.reference import CrossEntropyConfig, reduce, smoothing_terms

_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
CHUNK_BYTES = 40 * 2**20
_MAX_CHUNK, _MIN_CHUNK = 512, 64  # tokens: a multiple of 64, which every panel divides
_MAX_GROUPS, _MIN_GROUP = 32, 128  # groups of classes, and classes in one


def why_not(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    target: Tensor,
    cfg: CrossEntropyConfig,
    needs: tuple[bool, bool, bool],
) -> str | None:
    """One sentence why this backend can't run the call, or None if it can."""
    if not hidden.is_cpu:
        return f"hidden is on {hidden.device}, the cpu backend needs it on the CPU"
    if not _native.available():
        return _native.why_not_available()
    if hidden.dtype not in _DTYPES:
        return (
            f"hidden is {hidden.dtype}, the cpu backend takes float32, float64, float16 and "
            "bfloat16"
        )
    return None


def fwd(
    hidden: Tensor,  # [T, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    class_weight: Tensor | None,  # [V]
    target: Tensor,  # int64 [T]
    cfg: CrossEntropyConfig,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, lse [T], dhidden, dweight, dbias) as the reference."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    counts = target != cfg.ignore_index
    tokens = counts.nonzero().squeeze(-1)
    if class_weight is not None:
        class_weight = class_weight.to(dtype).contiguous()
    divisor = None
    if cfg.reduction == "mean":
        if class_weight is None:
            divisor = torch.tensor(len(tokens), dtype=dtype)
        else:
            divisor = class_weight[target[tokens]].sum()
    factor = None
    if cfg.reduction != "none" and any(needs):
        factor = torch.ones(len(tokens), dtype=dtype)
        if divisor is not None:
            factor /= divisor
    (loss, nll, lse), grads = _run(
        hidden, weight, bias, class_weight, target, tokens, factor, cfg, needs
    )
    if cfg.reduction != "none":
        loss, nll = reduce(loss, divisor), reduce(nll, divisor)
    dhidden, dweight, dbias = (hidden.new_empty(0) if g is None else g for g in grads)
    return loss, nll, lse, dhidden, dweight, dbias


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
    tokens = (target != cfg.ignore_index).nonzero().squeeze(-1)
    if class_weight is not None:
        class_weight = class_weight.to(lse.dtype).contiguous()
    factor = grad_loss.to(lse.dtype)[tokens]
    return _run(hidden, weight, bias, class_weight, target, tokens, factor, cfg, needs)[1]


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    target: Tensor,
    tokens: Tensor,  # int64: which count
    factor: Tensor | None,  # of the gradients, for each of `tokens`; None: no gradients
    cfg: CrossEntropyConfig,
    needs: tuple[bool, bool, bool],
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """(loss, nll, lse) [T], and the gradients of hidden, weight, bias: None where not wanted."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    classes, dim = weight.shape
    loss, nll, lse = (torch.zeros(len(target), dtype=dtype) for _ in range(3))
    wanted = [need and factor is not None for need in needs]
    wanted[2] = wanted[2] and bias is not None
    all_count, none_counts = len(tokens) == len(target), len(tokens) == 0
    grad_hidden = grad_weight = grad_bias = None
    if wanted[0]:
        grad_hidden = (torch.empty if all_count else torch.zeros)(hidden.shape, dtype=hidden.dtype)
    make = torch.zeros if none_counts else torch.empty
    if wanted[1]:
        grad_weight = make(classes, dim, dtype=dtype)
    if wanted[2]:
        grad_bias = make(classes, dtype=dtype)

    chunk = min(_MAX_CHUNK, CHUNK_BYTES // (classes * dtype.itemsize))
    chunk = min(max(_MIN_CHUNK, chunk // _MIN_CHUNK * _MIN_CHUNK), _round_up(len(tokens), 64))
    groups = max(1, min(_MAX_GROUPS, classes // _MIN_GROUP))
    _native.lib().cross_entropy_run(
        hidden,
        weight,
        None if bias is None else bias.to(dtype).contiguous(),
        class_weight,
        target.contiguous(),
        tokens,
        factor if any(wanted) else None,
        *smoothing_terms(cfg, classes),
        classes if class_weight is None else float(class_weight.sum()),
        loss,
        nll,
        lse,
        grad_hidden,
        grad_weight,
        grad_bias,
        torch.empty(chunk, classes if any(wanted) else 0, dtype=dtype),
        torch.empty(2, chunk, _round_up(dim, 64), dtype=dtype),
        torch.empty(groups, chunk, dim if wanted[0] else 0, dtype=dtype),
        torch.empty(groups + 1, 5, chunk, dtype=dtype),
        torch.get_num_threads(),
    )
    if grad_weight is not None:
        grad_weight = grad_weight.to(weight.dtype)
    if grad_bias is not None and bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return (loss, nll, lse), (grad_hidden, grad_weight, grad_bias)


def _round_up(n: int, to: int) -> int:
    return (n + to - 1) // to * to
