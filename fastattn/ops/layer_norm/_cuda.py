"""LayerNorm of a residual sum by the CUDA C++ kernels of csrc/layer_norm, which say how."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn._cuda import rows as by_rows
from fastattn._cuda.params import FLOAT, INT32, INT64, POINTER
from fastattn.ops.layer_norm import reference
from fastattn.ops.layer_norm.reference import sum_dtype

_MAX_PARTS = 256  # lines of partial sums over rows; the same on every card, and so are the bits
_MAX_SPLITS = 32  # lines where rows are too long for a block
_FORWARD, _BACKWARD = (f"layer_norm/layer_norm_{d}.cuh" for d in ("fwd", "bwd"))
_WARPS_SHARED = 4 * 1024 * 4  # bytes for the sums of a block's four warps
_COLUMN_WARPS = 8
_FORWARD_PARAMS = _cuda.Params(
    "layer_norm/layer_norm_params.cuh",
    "fa::LayerNormForwardParams<float, float>",
    **dict.fromkeys(("x", "residual", "weight", "bias", "out", "sum", "mean", "rstd"), POINTER),
    dropout=_cuda.DROPOUT,
    **dict.fromkeys(("rows", "x_row", "residual_row"), INT64),
    **dict.fromkeys(("columns", "weight_type", "bias_type"), INT32),
    eps=FLOAT,
)
_BACKWARD_PARAMS = _cuda.Params(
    "layer_norm/layer_norm_params.cuh",
    "fa::LayerNormBackwardParams<float, float>",
    **dict.fromkeys(("grad_out", "grad_sum", "sum", "weight", "mean", "rstd"), POINTER),
    **dict.fromkeys(("grad_x", "grad_residual", "partial"), POINTER),
    dropout=_cuda.DROPOUT,
    **dict.fromkeys(("rows", "grad_out_row", "grad_sum_row", "sum_row"), INT64),
    **dict.fromkeys(("columns", "weight_type"), INT32),
)
_PARAMETERS_PARAMS = _cuda.Params(
    "layer_norm/layer_norm_params.cuh",
    "fa::LayerNormParametersParams",
    **dict.fromkeys(("partial", "grad_weight", "grad_bias"), POINTER),
    **dict.fromkeys(("parts", "columns", "weight_type", "bias_type"), INT32),
)
_PARAMETERS = _cuda.Kernel(_BACKWARD, "fa::layer_norm_parameters<256>", 256, 256 * 4)


def _forward_kernel(types: tuple[str, str], columns: int) -> _cuda.Kernel:
    size, walks = by_rows.team(columns)
    return by_rows.team_kernel(_FORWARD, "layer_norm_forward", types, size, walks)


def _backward_kernel(types: tuple[str, str], columns: int) -> _cuda.Kernel:
    size, walks = by_rows.team(columns)
    kernel = by_rows.team_kernel(_BACKWARD, "layer_norm_backward", types, size, walks)
    return kernel._replace(shared=_WARPS_SHARED) if size == 32 else kernel


def _default_set(arch: int) -> Iterator[_cuda.Kernel]:
    """Rows of up to 1024; x and residual of one type, or a float32 residual beside a half x."""
    yield _PARAMETERS
    for x in by_rows.usual_types(arch):
        for residual in dict.fromkeys((x, "float")):
            yield _forward_kernel((x, residual), 1024)
            yield _backward_kernel((x, residual), 1024)


_cuda.register_kernels("add_layer_norm", _default_set)


def why_not(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
    eps: float,
    keep_sum: bool,
) -> str | None:
    """One sentence why this backend can't run the call, or None if it can."""
    return _cuda.why_not_on(x.device) or unsupported(x, residual, weight, bias)


def unsupported(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> str | None:
    """What the kernels can't do, on whichever device."""
    return by_rows.unsupported("x", x, residual, weight, bias)


def fwd(
    x: Tensor,  # [..., N]
    residual: Tensor | None,  # [..., N]
    weight: Tensor | None,  # [N]
    bias: Tensor | None,  # [N]
    rng_state: Tensor | None,
    dropout_p: float,
    eps: float,
    keep_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, sum or empty, mean [rows], rstd [rows]) as the reference."""
    if x.numel() == 0:
        return reference.fwd(x, residual, weight, bias, rng_state, dropout_p, eps, keep_sum)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    kept = x.new_empty(x.shape if keep_sum else 0, dtype=sum_dtype(x, residual))
    flat = by_rows.as_rows(x)
    rows, columns = flat.shape
    other = flat if residual is None else by_rows.as_rows(residual)
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    dropout = _dropout(rng_state, dropout_p)
    params = _FORWARD_PARAMS.pack(
        flat, None if residual is None else other, weight, bias, out, kept if keep_sum else None,
        mean, rstd, *dropout, rows, flat.stride(0), other.stride(0),
        columns, by_rows.type_of(weight), by_rows.type_of(bias), eps,
    )  # fmt: skip
    types = by_rows.TYPES[flat.dtype], by_rows.TYPES[other.dtype]
    kernel = _forward_kernel(types, columns)
    blocks = by_rows.blocks(rows, by_rows.team(columns)[0])
    _cuda.launch(x.device, kernel, (blocks, 1, 1), params)
    return out, kept, mean, rstd


def bwd(
    grad_out: Tensor | None,  # [..., N]
    grad_sum: Tensor | None,  # [..., N]
    sum: Tensor,  # [..., N]: what was normalised
    weight: Tensor | None,
    mean: Tensor,  # [rows]
    rstd: Tensor,  # [rows]
    rng_state: Tensor | None,
    dropout_p: float,
    needs: tuple[bool, bool, bool, bool],  # x, residual, weight, bias
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, residual, weight and bias, None where not needed."""
    if sum.numel() == 0:
        return reference.bwd(
            grad_out, grad_sum, sum, weight, mean, rstd, rng_state, dropout_p, needs, x_dtype,
            residual_dtype, bias_dtype,
        )  # fmt: skip
    empty = {"memory_format": torch.contiguous_format}
    grad_x = torch.empty_like(sum, dtype=x_dtype, **empty) if needs[0] else None
    grad_residual = grad_weight = grad_bias = None
    if needs[1] and residual_dtype is not None:
        grad_residual = torch.empty_like(sum, dtype=residual_dtype, **empty)
    if needs[2] and weight is not None:
        grad_weight = weight.new_empty(weight.shape)
    if needs[3] and bias_dtype is not None:
        grad_bias = sum.new_empty(sum.shape[-1], dtype=bias_dtype)
    call = _Backward(grad_out, grad_sum, sum, weight, mean, rstd, x_dtype, residual_dtype)
    sums_rows = grad_weight is not None or grad_bias is not None
    partial = call.rows_kernel(grad_x, grad_residual, sums_rows, rng_state, dropout_p)
    if partial is not None:
        params = _PARAMETERS_PARAMS.pack(
            partial, grad_weight, grad_bias, len(partial), call.columns,
            by_rows.type_of(grad_weight), by_rows.type_of(grad_bias),
        )  # fmt: skip
        _cuda.launch(sum.device, _PARAMETERS, (-(-call.columns // 32), 2, 1), params)
    return grad_x, grad_residual, grad_weight, grad_bias


class _Backward:
    """The inputs of a backward as its kernels want them."""

    def __init__(
        self,
        grad_out: Tensor | None,
        grad_sum: Tensor | None,
        total: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        x_dtype: torch.dtype,
        residual_dtype: torch.dtype | None,
    ):
        self.total = by_rows.as_rows(total)
        self.rows, self.columns = self.total.shape
        self.grad_out = None if grad_out is None else by_rows.as_rows(grad_out, x_dtype)
        self.grad_sum = None if grad_sum is None else by_rows.as_rows(grad_sum, total.dtype)
        self.weight = None if weight is None else weight.contiguous()
        self.mean, self.rstd = mean.contiguous(), rstd.contiguous()
        self.types = by_rows.TYPES[x_dtype], by_rows.TYPES[residual_dtype or x_dtype]

    def rows_kernel(
        self,
        grad_x: Tensor | None,
        grad_residual: Tensor | None,
        sums_rows: bool,
        rng_state: Tensor | None,
        dropout_p: float,
    ) -> Tensor | None:
        """Fills the gradients of x and residual; partial sums [parts, 2, N], if wanted."""
        size, walks = by_rows.team(self.columns)
        blocks = by_rows.blocks(self.rows, size, by_rows.MAX_BLOCKS if walks else _MAX_PARTS)
        partial = None
        if sums_rows and not walks:
            partial = self.mean.new_empty(blocks, 2, self.columns)
        if grad_x is not None or grad_residual is not None or partial is not None:
            kernel = _backward_kernel(self.types, self.columns)
            dropout = _dropout(rng_state, dropout_p)
            params = self._params(grad_x, grad_residual, partial, dropout)
            _cuda.launch(self.total.device, kernel, (blocks, 1, 1), params)
        return self._column_sums() if sums_rows and walks else partial

    def _column_sums(self) -> Tensor:
        x_type = self.types[0]
        width = 32 * (4 if x_type == "float" else 8)  # columns of a block
        splits = min(-(-self.rows // _COLUMN_WARPS), _MAX_SPLITS)
        partial = self.mean.new_empty(splits, 2, self.columns)
        name = f"fa::layer_norm_column_sums<{', '.join(self.types)}>"
        kernel = _cuda.Kernel(_BACKWARD, name, 32 * _COLUMN_WARPS, _COLUMN_WARPS * width * 4)
        params = self._params(None, None, partial, _dropout(None, 0.0))
        _cuda.launch(self.total.device, kernel, (-(-self.columns // width), splits, 1), params)
        return partial

    def _params(
        self,
        grad_x: Tensor | None,
        grad_residual: Tensor | None,
        partial: Tensor | None,
        dropout: tuple,
    ) -> bytes:
        strides = (0 if t is None else t.stride(0) for t in (self.grad_out, self.grad_sum))
        return _BACKWARD_PARAMS.pack(
            self.grad_out, self.grad_sum, self.total, self.weight, self.mean, self.rstd, grad_x,
            grad_residual, partial, *dropout, self.rows, *strides, self.total.stride(0),
            self.columns, by_rows.type_of(self.weight),
        )  # fmt: skip


def _dropout(rng_state: Tensor | None, p: float) -> tuple:
    """Kernels draw nothing without a state."""
    if p == 0 or rng_state is None:
        return _cuda.dropout_fields(None, 0.0)
    return _cuda.dropout_fields(rng_state.contiguous(), p)
