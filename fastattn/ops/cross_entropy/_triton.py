"""Cross entropy in chunks: torch.mm for the products, a Triton kernel for the rows of logits."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fastattn import _triton
from fastattn._triton import configs
from fastattn.ops.cross_entropy import _chunked
from fastattn.ops.cross_entropy._chunked import RowResult
from fastattn.ops.cross_entropy.reference import CrossEntropyConfig, smoothing_terms


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
    return _triton.why_not("hidden", hidden, weight, bias, class_weight)


def _row_pass(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    cfg: CrossEntropyConfig,
    factor: Tensor | None,
) -> RowResult:
    from fastattn.ops.cross_entropy._triton_kernels import _cross_entropy_rows_kernel

    rows, classes = logits.shape
    result = RowResult(*(logits.new_empty(rows) for _ in range(3)))
    config = configs.classes(classes, _triton.arch(logits))
    a, b = smoothing_terms(cfg, classes)
    weights = logits if class_weight is None else class_weight
    _triton.launch(
        _cross_entropy_rows_kernel, rows, config,
        logits, target, weights, logits if factor is None else factor, *result,
        classes, logits.stride(0), target.stride(0), weights.stride(-1), cfg.ignore_index, a, b,
        HAS_WEIGHTS=class_weight is not None, SMOOTHS=b != 0, WANTS_GRADIENT=factor is not None,
        BLOCK=config.block_n,
    )  # fmt: skip
    return result


fwd = partial(_chunked.fwd, _row_pass)
bwd = partial(_chunked.bwd, _row_pass)
