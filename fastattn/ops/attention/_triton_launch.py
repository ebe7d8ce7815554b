"""Launches of the attention kernels, for padded batches and packed sequences alike.

Packed tensors come as [B, H, T, D] of batch stride 0, with the offsets of their sequences. The last
dimension of every tensor is dense (see ``dense``), a mask's dense or of stride 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import _triton
from fastattn._philox import keep_scale
from fastattn._triton import configs
from fastattn._triton.configs import Config

MAX_HEAD_DIM = 256
_MAX_LENGTH = 2**30
_NO_MASK, _BOOL, _ADDED = range(3)


class Problem(NamedTuple):
    """What forward and backward are asked. ``ends``: cu_seqlens of queries and keys, if packed."""

    query: Tensor  # [B, Hq, Lq, DK]
    key: Tensor  # [B, Hk, Lk, DK]
    value: Tensor  # [B, Hk, Lk, DV]
    mask: Tensor | None  # [B, Hq, Lq, Lk]
    padding: Tensor | None  # bool [B, Lk]
    rng_state: Tensor | None
    ends: tuple[Tensor, Tensor] | None
    q_len: int  # the longest, if packed
    kv_len: int
    scale: float
    is_causal: bool
    bottom_right: bool
    window_left: int
    window_right: int
    dropout_p: float

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def group(self) -> int:
        return max(1, self.heads // max(1, self.key.shape[1]))

    @property
    def mask_kind(self) -> int:
        if self.mask is None:
            return _NO_MASK
        return _BOOL if self.mask.dtype == torch.bool else _ADDED

    @property
    def sides(self) -> tuple[int, int]:
        """How far a query sees to the left and to the right of the diagonal; -1: to the end."""
        left, right = self.window_left, 0 if self.is_causal else self.window_right
        reach = self.q_len + self.kv_len
        return (left if left < reach else -1), (right if right < reach else -1)


def dense(x: Tensor) -> Tensor:
    """x with a last dimension of stride 1, copied if need be."""
    return x if x.stride(-1) == 1 else x.contiguous()


def why_not_heads(query: Tensor, key: Tensor, value: Tensor, heads: int, q_len: int) -> str | None:
    """One sentence why the kernels can't take such heads, or None if they can."""
    reason = _triton.why_not("query", query)
    if reason is not None:
        return reason
    widest = max(query.shape[-1], value.shape[-1])
    if widest > MAX_HEAD_DIM:
        return f"head dimension {widest}, the triton backend takes up to {MAX_HEAD_DIM}"
    if max(query.numel(), key.numel()) and max(q_len, key.shape[-2]) > _MAX_LENGTH:
        return "a length of more than 2^30"
    if heads * _triton.cdiv(q_len, 16) >= 2**31:
        return "more than 2^31 blocks of queries"
    return None


def forward(problem: Problem, output: Tensor, lse: Tensor, lse_low: Tensor) -> None:
    """Fills output [B, Hq, Lq, DV], lse and lse_low [B, Hq, Lq] (all of batch stride 0, if
    packed)."""
    from fastattn.ops.attention._triton_fwd_kernels import _attention_fwd_kernel

    blocks, config = _config(problem, "forward")
    tiles = _triton.cdiv(problem.q_len, config.block_m)
    programs = tiles * problem.query.shape[0] * problem.heads
    splits = 1
    if problem.ends is None:
        splits = configs.attention_splits(
            programs, problem.q_len, problem.kv_len, config.block_n, _triton.arch(problem.query)
        )
    results: tuple[Tensor, ...] = (output, lse, lse_low)
    if splits > 1:
        results = (
            lse.new_empty(splits, *output.shape),
            *(lse.new_empty(splits, *lse.shape) for _ in range(2)),
        )
    out_strides, lse_strides = results[0].stride(), results[1].stride()
    _triton.launch(
        _attention_fwd_kernel, programs * splits, config,
        *_tensors(problem), *results,
        problem.heads, problem.group, problem.q_len, problem.kv_len, tiles,
        *problem.query.stride()[:3], *problem.key.stride()[:3], *problem.value.stride()[:3],
        *_mask_strides(problem), *out_strides[-4:-1], out_strides[0] if splits > 1 else 0,
        *lse_strides[-3:-1], lse_strides[0] if splits > 1 else 0,
        problem.scale, *problem.sides, *_dropout(problem),
        **blocks, SPLITS=splits, IS_PACKED=problem.ends is not None, **_pattern(problem),
        IS_SCALED=problem.scale <= 0 or problem.mask_kind == _ADDED,
        PRECISION=_precision(problem),
    )  # fmt: skip
    if splits > 1:
        _combine(problem, results, output, lse, lse_low)


def _combine(
    problem: Problem, parts: tuple[Tensor, ...], output: Tensor, lse: Tensor, lse_low: Tensor
) -> None:
    from fastattn.ops.attention._triton_fwd_kernels import _attention_combine_kernel

    splits, rows, value_dim = parts[0].shape[0], lse.numel(), output.shape[-1]
    config = Config(16, 16, 4, 1)
    _triton.launch(
        _attention_combine_kernel, _triton.cdiv(rows, config.block_m), config,
        *parts, output, lse, lse_low, rows, problem.heads, problem.q_len, *output.stride()[:3],
        SPLITS=splits, DV=value_dim, BLOCK_DV=configs.power_of_2(value_dim, 16),
        ROWS=config.block_m,
    )  # fmt: skip


def weights(problem: Problem, lse: Tensor, lse_low: Tensor, out: Tensor) -> None:
    """Fills out [B, Hq, Lq, Lk], contiguous, in any dtype; not for packed sequences."""
    from fastattn.ops.attention._triton_fwd_kernels import _attention_weights_kernel

    blocks, config = _config(problem, "dq")
    tiles = _triton.cdiv(problem.q_len, config.block_m)
    along = _triton.cdiv(problem.kv_len, config.block_n)
    blocks = {name: blocks[name] for name in ("DK", "BLOCK_DK", "BLOCK_M", "BLOCK_N")}
    q, k, _, mask, padding, rng_state, *_ = _tensors(problem)
    _triton.launch(
        _attention_weights_kernel, tiles * along * problem.query.shape[0] * problem.heads, config,
        q, k, mask, padding, rng_state, lse, lse_low, out,
        problem.heads, problem.group, problem.q_len, problem.kv_len, tiles,
        *q.stride()[:3], *k.stride()[:3], *_mask_strides(problem),
        problem.scale, *problem.sides, *_dropout(problem),
        **blocks, **_pattern(problem), PRECISION=_precision(problem),
    )  # fmt: skip


def delta(
    problem: Problem,
    output: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    weight_sums: Tensor | None,
    out: Tensor,
) -> None:
    """Fills out [B, Hq, Lq] with rowsum(dO O) + rowsum(dW W) - dLSE; of batch stride 0, if packed.

    grad_lse and weight_sums lie as out does.
    """
    from fastattn.ops.attention._triton_bwd_kernels import _attention_delta_kernel

    value_dim = output.shape[-1]
    config = Config(32, 32, 4, 1)
    tiles = _triton.cdiv(problem.q_len, config.block_m)
    _triton.launch(
        _attention_delta_kernel, tiles * problem.query.shape[0] * problem.heads, config,
        output, grad_output, out if grad_lse is None else grad_lse,
        out if weight_sums is None else weight_sums, out, _ends(problem)[0],
        problem.heads, problem.q_len, tiles,
        *output.stride()[:3], *grad_output.stride()[:3], *out.stride()[:2],
        DV=value_dim, BLOCK_DV=configs.power_of_2(value_dim, 16), BLOCK_M=config.block_m,
        IS_PACKED=problem.ends is not None, HAS_GRAD_LSE=grad_lse is not None,
        HAS_WEIGHT_SUMS=weight_sums is not None,
    )  # fmt: skip


def backward(
    problem: Problem,
    grad_output: Tensor,
    grad_weights: Tensor | None,
    lse: Tensor,
    lse_low: Tensor,
    delta: Tensor,
    grad_query: Tensor | None,
    grad_key: Tensor | None,
    grad_value: Tensor | None,
    grad_scores: Tensor | None,
) -> None:
    """Fills the gradients that are not None; grad_scores float32 [B, Hq, Lq, Lk], zeros before."""
    from fastattn.ops.attention._triton_bwd_kernels import (
        _attention_dkdv_kernel,
        _attention_dq_kernel,
    )

    batch, kv_heads = problem.query.shape[0], problem.key.shape[1]
    given = *_tensors(problem), grad_output, lse if grad_weights is None else grad_weights
    strides = (
        *problem.query.stride()[:3], *problem.key.stride()[:3], *problem.value.stride()[:3],
        *_mask_strides(problem), *grad_output.stride()[:3],
        *_three_strides(grad_weights), *lse.stride()[:2],
    )  # fmt: skip
    scalars = problem.scale, *problem.sides, *_dropout(problem)
    constants = {
        **_pattern(problem), "IS_PACKED": problem.ends is not None,
        "HAS_GRAD_WEIGHTS": grad_weights is not None, "PRECISION": _precision(problem),
    }  # fmt: skip
    if grad_query is not None or grad_scores is not None:
        blocks, config = _config(problem, "dq", grad_weights is not None)
        tiles = _triton.cdiv(problem.q_len, config.block_m)
        dq = torch.empty_like(problem.query) if grad_query is None else grad_query
        _triton.launch(
            _attention_dq_kernel, tiles * batch * problem.heads, config,
            *given, lse, lse_low, delta, dq, lse if grad_scores is None else grad_scores,
            problem.heads, problem.group, problem.q_len, problem.kv_len, tiles,
            *strides, *dq.stride()[:3], *scalars,
            **blocks, **constants, WANTS_SCORES=grad_scores is not None,
        )  # fmt: skip
    if grad_key is not None or grad_value is not None:
        blocks, config = _config(problem, "dkdv", grad_weights is not None)
        tiles = _triton.cdiv(problem.kv_len, config.block_n)
        dk, dv = (lse if x is None else x for x in (grad_key, grad_value))
        _triton.launch(
            _attention_dkdv_kernel, tiles * batch * kv_heads, config,
            *given, lse, lse_low, delta, dk, dv,
            kv_heads, problem.group, problem.q_len, problem.kv_len, tiles,
            *strides, *_three_strides(grad_key), *_three_strides(grad_value), *scalars,
            **blocks, **constants, WANTS_K=grad_key is not None, WANTS_V=grad_value is not None,
        )  # fmt: skip


def _config(
    problem: Problem, kernel: str, reads_scores: bool = False
) -> tuple[dict[str, int], Config]:
    head_dim, value_dim = problem.query.shape[-1], problem.value.shape[-1]
    block_dk, block_dv, config = configs.attention(
        kernel,
        head_dim,
        value_dim,
        problem.query.dtype.itemsize,
        _triton.arch(problem.query),
        is_heavy=reads_scores or problem.mask is not None or _triton.drops(problem.dropout_p),
        q_len=problem.q_len,
    )
    constants = {
        "DK": head_dim, "DV": value_dim, "BLOCK_DK": block_dk, "BLOCK_DV": block_dv,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
    }  # fmt: skip
    return constants, config


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    """q, k, v, mask, padding, rng_state, ends; the query stands in for what no kernel reads."""
    query, key, value, mask, padding, rng_state = problem[:6]
    bytes_or_query = (query if x is None else _triton.as_bytes(x) for x in (mask, padding))
    return (
        query, key, value, *bytes_or_query, query if rng_state is None else rng_state,
        *_ends(problem),
    )  # fmt: skip


def _ends(problem: Problem) -> tuple[Tensor, Tensor]:
    return problem.ends or (problem.query, problem.query)


def _mask_strides(problem: Problem) -> tuple[int, ...]:
    return (
        *_three_strides(problem.mask),
        *((0, 0) if problem.padding is None else problem.padding.stride()),
    )


def _three_strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _dropout(problem: Problem) -> tuple[int, float]:
    if not _triton.drops(problem.dropout_p):
        return 0, 1.0
    return _triton.last_dropped(problem.dropout_p), keep_scale(problem.dropout_p)


def _pattern(problem: Problem) -> dict[str, Any]:
    left, right = problem.sides
    return {
        "BOTTOM_RIGHT": problem.bottom_right, "HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0,
        "MASK": problem.mask_kind,
        "MASK_COLUMN": 0 if problem.mask is None else problem.mask.stride(-1),
        "HAS_PADDING": problem.padding is not None,
        "DROPS": _triton.drops(problem.dropout_p),
    }  # fmt: skip


def _precision(problem: Problem) -> str:
    """Of products of float32: three of tensor cores' TF32 keep what one would lose."""
    is_nvidia = _triton.arch(problem.query).startswith("sm_")
    return "tf32x3" if is_nvidia and problem.query.dtype == torch.float32 else "ieee"
