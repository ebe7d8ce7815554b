"""Dropout by the CUDA kernel of csrc/dropout; its own backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn._cuda.params import INT64, POINTER

_TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
_THREADS = 256
_MAX_BLOCKS = 4096  # each walks over what is left
_PARAMS = _cuda.Params(
    "dropout/dropout_params.cuh",
    "fa::DropoutParamsOf<float>",
    x=POINTER,
    out=POINTER,
    dropout=_cuda.DROPOUT,
    rows=INT64,
    columns=INT64,
)


def _kernel(dtype: torch.dtype) -> _cuda.Kernel:
    name = f"fa::dropout_forward<{_TYPES[dtype]}>"
    return _cuda.Kernel("dropout/dropout.cuh", name, _THREADS)


def _default_set(arch: int) -> list[_cuda.Kernel]:
    return [_kernel(dtype) for dtype in _TYPES]


_cuda.register_kernels("dropout", _default_set)


def why_not(x: Tensor, rng_state: Tensor, p: float) -> str | None:
    """One sentence why this backend can't run the call, or None if it can."""
    return _cuda.why_not_on(x.device) or unsupported(x, rng_state, p)


def unsupported(x: Tensor, rng_state: Tensor, p: float) -> str | None:
    """What the kernel can't do, on whichever device."""
    if x.dtype not in _TYPES:
        return f"x is {x.dtype}, the kernel takes float32, float16 and bfloat16"
    return None


def fwd(x: Tensor, rng_state: Tensor, p: float) -> Tensor:
    """x where kept, times 1 / (1 - p), else 0; contiguous, in x's dtype. Its own backward."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel() > 0:
        columns = x.size(-1) if x.dim() else 1
        rows = x.numel() // columns
        groups = rows * ((columns + 3) // 4)
        blocks = min((groups + _THREADS - 1) // _THREADS, _MAX_BLOCKS)
        dropout = _cuda.dropout_fields(rng_state.contiguous(), p)
        params = _PARAMS.pack(x, out, *dropout, rows, columns)
        _cuda.launch(x.device, _kernel(x.dtype), (blocks, 1, 1), params)
    return out
