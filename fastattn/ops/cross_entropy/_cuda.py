"""Cross entropy in chunks: torch.mm for the products, a CUDA C++ kernel for the rows of logits."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn._cuda import rows as by_rows
from fastattn._cuda.params import FLOAT, INT32, INT64, POINTER
from fastattn.ops.cross_entropy import _chunked
from fastattn.ops.cross_entropy._chunked import RowResult
from fastattn.ops.cross_entropy.reference import CrossEntropyConfig, smoothing_terms

_PARAMS = _cuda.Params(
    "cross_entropy/cross_entropy_params.cuh",
    "fa::CrossEntropyParams",
    **dict.fromkeys(("logits", "target", "class_weight", "weight_sum", "factor"), POINTER),
    **dict.fromkeys(("loss", "nll", "lse"), POINTER),
    **dict.fromkeys(("tokens", "logits_row", "target_stride", "ignore_index"), INT64),
    **dict.fromkeys(("classes", "weight_type"), INT32),
    **dict.fromkeys(("a", "b"), FLOAT),
)
_THREADS = 256
_KERNEL = _cuda.Kernel(
    "cross_entropy/cross_entropy_rows.cuh",
    f"fa::cross_entropy_rows<{_THREADS}>",
    _THREADS,
    _THREADS // 32 * 4,
)
_cuda.register_kernels("linear_cross_entropy", lambda arch: [_KERNEL])


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
    return _cuda.why_not_on(hidden.device) or unsupported(hidden, weight, bias, class_weight)


def unsupported(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None
) -> str | None:
    """What the kernel can't do, on whichever device."""
    if len(weight) > by_rows.MAX_COLUMNS:
        return f"weight has {len(weight)} classes, the kernel takes up to {by_rows.MAX_COLUMNS}"
    return by_rows.unsupported("hidden", hidden, weight, bias, class_weight)


def _row_pass(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    cfg: CrossEntropyConfig,
    factor: Tensor | None,
) -> RowResult:
    tokens, classes = logits.shape
    result = RowResult(*(logits.new_empty(tokens) for _ in range(3)))
    a, b = smoothing_terms(cfg, classes)
    weight_sum = None
    if class_weight is not None:
        class_weight = class_weight.contiguous()
        weight_sum = class_weight.to(torch.float32).sum() if b else None
    factor = None if factor is None else factor.contiguous()
    params = _PARAMS.pack(
        logits, target, class_weight, weight_sum, factor, *result, tokens, logits.stride(0),
        target.stride(0), cfg.ignore_index, classes, by_rows.type_of(class_weight), a, b,
    )  # fmt: skip
    blocks = min(tokens, by_rows.MAX_BLOCKS)
    _cuda.launch(logits.device, _KERNEL, (blocks, 1, 1), params)
    return result


fwd = partial(_chunked.fwd, _row_pass)
bwd = partial(_chunked.bwd, _row_pass)
