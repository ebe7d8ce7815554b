"""The launches that the offline gates compile: every Triton kernel, dtype and head dimension.

Each case runs a backend's own host on meta tensors, so that what is compiled is what a call runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.ops.attention import _triton as attention
from fastattn.ops.attention import _varlen_triton as varlen
from fastattn.ops.attention.reference import AttentionConfig
from fastattn.ops.attention.varlen_reference import VarlenConfig
from fastattn.ops.cross_entropy import _triton as cross_entropy
from fastattn.ops.cross_entropy.reference import CrossEntropyConfig
from fastattn.ops.dropout import _triton as dropout
from fastattn.ops.layer_norm import _triton as layer_norm
from fastattn.ops.softmax import _triton as softmax
from fastattn.testing.triton_offline import SHARED_LIMITS, Compiled, Launch, recorded

ARCHS = tuple(SHARED_LIMITS)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 128)
MATRIX_PRODUCTS = ("attention_fwd", "attention_dq", "attention_dkdv", "attention_weights")
TENSOR_CORES = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "mfma"}
_ALL = (True, True, True, True)


class Case(NamedTuple):
    """``run`` makes the launches; ``size``: the head dimension, or a row's elements."""

    name: str
    dtype: torch.dtype
    size: int
    run: Callable[[], None]

    @property
    def label(self) -> str:
        return f"{self.name}-{str(self.dtype).removeprefix('torch.')}-{self.size}"

    @property
    def is_low(self) -> bool:
        return self.name == "decode"

    def launches(self, arch: str) -> list[Launch]:
        """One of every kernel that the case launches on ``arch``."""
        with recorded(arch) as found:
            self.run()
        return list({launch.name: launch for launch in found}.values())


def cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for dim in HEAD_DIMS:
            for name, options in ATTENTION.items():
                yield Case(name, dtype, dim, partial(_attend, dtype, dim, **options))
            yield Case("packed", dtype, dim, partial(_attend_packed, dtype, dim))
        for columns in (512, 8192, 65536):
            yield Case("rows", dtype, columns, partial(_rows, dtype, columns))


ATTENTION: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "masked": {"mask": torch.bool, "pads": True, "dropout_p": 0.1},
    "biased": {"mask": torch.float32, "window": (128, 0), "wants_mask": True},
    "weights": {"return_weights": True},
    "decode": {"q_len": 1, "group": 4},
}


def faults(compiled: Compiled, dtype: torch.dtype, *, is_low: bool = False) -> list[str]:
    """What the gates have against a kernel, in words; nothing if it passes.

    ``is_low``: with one query, a tile is too low for Hopper's and Blackwell's own instructions.
    """
    found = []
    name = compiled.name.removesuffix("_kernel")
    if compiled.spilled:
        found.append(f"{compiled.spilled} bytes of stack or local memory a thread")
    if compiled.shared > SHARED_LIMITS[compiled.arch]:
        found.append(f"{compiled.shared} bytes of shared memory, {compiled.arch} has less")
    wanted = TENSOR_CORES[compiled.arch]
    if is_low and name == "attention_fwd" and "HMMA" in compiled.tensor:
        wanted = "HMMA"
    if name in MATRIX_PRODUCTS and dtype.itemsize == 2 and not compiled.tensor.get(wanted):
        found.append(f"no {wanted}, only {compiled.tensor or 'plain instructions'}")
    return found


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attend(
    dtype: torch.dtype, dim: int, *, is_causal: bool = False, mask: torch.dtype | None = None,
    pads: bool = False, dropout_p: float = 0.0, window: tuple[int, int] = (-1, -1),
    return_weights: bool = False, wants_mask: bool = False, q_len: int = 2048, group: int = 1,
) -> None:  # fmt: skip
    batch, heads, kv_len = 2, 16, 2048
    q = _empty(batch, heads, q_len, dim, dtype=dtype)
    k = _empty(batch, heads // group, kv_len, dim, dtype=dtype)
    added = None if mask is None else _empty(batch, 1, q_len, kv_len, dtype=mask)
    padding = _empty(batch, kv_len, dtype=torch.bool) if pads else None
    rng = _empty(2, dtype=torch.int64)
    cfg = AttentionConfig(0.125, is_causal, False, *window, dropout_p, return_weights, True)
    inputs = q, k, k, added, padding, rng
    attention.fwd(*inputs, cfg)
    lse = _empty(batch, heads, q_len, dtype=torch.float32)
    grad_weights = _empty(batch, heads, q_len, kv_len, dtype=dtype) if return_weights else None
    needs = (True, True, True, wants_mask)
    attention.bwd(q, None, grad_weights, *inputs, q, lse, lse, cfg, needs)


def _attend_packed(dtype: torch.dtype, dim: int) -> None:
    heads, tokens = 16, 4096
    q = _empty(tokens, heads, dim, dtype=dtype)
    ends, rng = _empty(9, dtype=torch.int32), _empty(2, dtype=torch.int64)
    cfg = VarlenConfig(0.125, True, True, -1, -1, 0.0, 1024, 1024)
    varlen.fwd(q, q, q, ends, ends, rng, cfg)
    lse = _empty(heads, tokens, dtype=torch.float32)
    varlen.bwd(q, lse, q, q, q, ends, ends, rng, q, lse, lse, cfg, _ALL[:3])


def _rows(dtype: torch.dtype, columns: int) -> None:
    x, rng = _empty(4096, columns, dtype=dtype), _empty(2, dtype=torch.int64)
    weight, stats = _empty(columns, dtype=torch.float32), _empty(4096, dtype=torch.float32)
    softmax.fwd(x, _empty(4096, columns, dtype=torch.bool), True, 0.5)
    softmax.bwd(x, x, 0.5)
    dropout.fwd(x, rng, 0.1)
    layer_norm.fwd(x, x, weight, weight, rng, 0.1, 1e-5, True)
    layer_norm.bwd(
        x, x, x, weight, stats, stats, rng, 0.1, _ALL, dtype, dtype, torch.float32
    )  # fmt: skip
    target = _empty(256, dtype=torch.int64)
    cfg = CrossEntropyConfig(0.1, False, -100, "mean")
    hidden, table = _empty(256, 512, dtype=dtype), _empty(columns, 512, dtype=dtype)
    cross_entropy.fwd(hidden, table, None, weight, target, cfg, _ALL[:3])
