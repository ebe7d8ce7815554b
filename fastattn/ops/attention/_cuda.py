"""Attention by the CUDA C++ kernels of csrc/attention, on a GPU or on emulated threads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn._cuda import DROPOUT, Kernel, Params, dropout_fields
from fastattn.ops.attention.reference import (
    AttentionConfig,
    empty_gradients,
    empty_output,
    sum_to_mask,
)

_TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
_TILE, _THREADS, _PIECE = 64, 128, 8 << 10  # of csrc/attention/attention_tile.cuh
_LONGEST, _FARTHEST = 1 << 29, (1 << 31) - 1  # kernels count positions in 32 bits
_NO_MASK, _BOOL_MASK, _OWN_MASK, _FLOAT_MASK = range(4)
_TENSOR = "P2q4i"
_TENSORS = (
    "query", "key", "value", "output", "attn_mask", "weights", "grad_output", "grad_weights",
    "grad_query", "grad_key", "grad_value", "grad_scores",
)  # fmt: skip
_PARAMS = Params(
    "attention/attention_params.cuh",
    "fa::AttentionParams<float>",
    **dict.fromkeys(_TENSORS, _TENSOR),
    **dict.fromkeys(("lse", "lse_low", "rows", "grad_lse", "padding"), "P"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "P"),
    dropout=DROPOUT,
    **dict.fromkeys(("stat_batch", "stat_head", "padding_batch", "padding_key"), "q"),
    scale="f",
    **dict.fromkeys(("batch", "heads", "group", "q_len", "kv_len", "key_dim", "value_dim"), "i"),
    **dict.fromkeys(("is_causal", "bottom_right", "window_left", "window_right"), "i"),
    **dict.fromkeys(("mask_kind", "tiles", "q_tiles"), "i"),
)


def _default_set(arch: int) -> Iterator[Kernel]:
    """Head dimensions to 128 in float32 and float16, as training and translation call them."""
    for dtype in ("float", "__half"):
        yield _kernel("rows", f"attention_delta<{dtype}>")
        for band, mask, dropout in product((False, True), repeat=3):
            switches = (band, mask, dropout)
            if not dropout:
                yield _kernel("rows", f"attention_weights<{dtype}", switches)
            if not (mask and dropout):
                yield _kernel("fwd", f"attention_forward<{dtype}, 64", switches, pieces=4)
                yield _kernel("bwd", f"attention_grad_query<{dtype}, 64", switches)
                yield _kernel("bwd", f"attention_grad_key_value<{dtype}, 64, 64", switches)
            if not mask and not dropout:
                yield _kernel("fwd", f"attention_forward<{dtype}, 128", switches)
                yield _kernel("bwd", f"attention_grad_query<{dtype}, 128", switches)
                for columns in ("128, 0", "0, 128"):
                    name = f"attention_grad_key_value<{dtype}, {columns}"
                    yield _kernel("bwd", name, switches)


def _kernel(file: str, name: str, switches: tuple[bool, ...] = (), pieces: int = 2) -> Kernel:
    """The kernel ``name`` with causal or window, mask and dropout switched on or off."""
    if switches:
        name += "".join(f", {str(x).lower()}" for x in switches) + ">"
    return Kernel(f"attention/attention_{file}.cuh", f"fa::{name}", _THREADS, pieces * _PIECE)


_cuda.register_kernels("attention", _default_set)


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """One sentence why the kernels can't run a call on any card, or None."""
    if query.dtype not in _TYPES:
        return f"query is {query.dtype}; float32, float16 and bfloat16 have CUDA C++ kernels"
    longest = max(query.shape[2], key.shape[2])
    if longest > _LONGEST:
        return f"the sequences have up to {longest} tokens; the kernels count to {_LONGEST}"
    farthest = max(stride for x in (query, key, value) for stride in x.stride()[2:])
    if farthest > _FARTHEST:
        return f"tokens lie {farthest} elements apart; the kernels accept up to {_FARTHEST}"
    return None


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    rng_state: Tensor | None,
    cfg: AttentionConfig,
) -> str | None:
    """One sentence why this backend can't run the call, or None if it can."""
    return _cuda.why_not_on(query.device) or unsupported(query, key, value)


def fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    rng_state: Tensor | None,
    cfg: AttentionConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output, lse, lse_low, weights) as ``reference.fwd``."""
    batch, heads, q_len, _ = query.shape
    output = empty_output(query, value)
    lse, lse_low = (query.new_empty(batch, heads, q_len, dtype=torch.float32) for _ in range(2))
    weights = query.new_empty((batch, heads, q_len, key.shape[2]) if cfg.return_weights else 0)
    call = Call(query, key, value, attn_mask, key_padding_mask, rng_state, cfg)
    call.give(output=output, lse=lse, lse_low=lse_low)
    call.forward()
    if weights.numel():
        call.give(weights=weights)
        call.weights()
    return output, lse, lse_low, weights


def bwd(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    rng_state: Tensor | None,
    output: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    cfg: AttentionConfig,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key, value and attn_mask as ``reference.bwd``, None where not needed.

    The gradient of attn_mask takes a float32 temporary [B, Hq, Lq, Lk].
    """
    if grad_output is None:
        grad_output = query.new_zeros(()).expand_as(output)
    call = Call(query, key, value, attn_mask, key_padding_mask, rng_state, cfg)
    call.give(
        output=output, lse=lse.contiguous(), lse_low=lse_low.contiguous(), grad_output=grad_output,
        grad_weights=grad_weights, grad_lse=None if grad_lse is None else grad_lse.contiguous(),
    )  # fmt: skip
    grads = empty_gradients((query, key, value), needs)
    grad_scores = None
    if needs[3] and attn_mask is not None:
        grad_scores = lse.new_zeros(*query.shape[:3], key.shape[2])
    call.give(grad_query=grads[0], grad_key=grads[1], grad_value=grads[2], grad_scores=grad_scores)
    call.backward()
    grad_mask = None
    if grad_scores is not None and attn_mask is not None:
        grad_mask = sum_to_mask(grad_scores, attn_mask)
    return grads[0], grads[1], grads[2], grad_mask


class Call:
    """One call's tensors and numbers, on their way to the kernels.

    Tensors are [B, H, L, D]; packed ones (``ends`` given: cu_seqlens of queries and keys) are
    [1, H, T, D], with ``longest`` the bounds of their lengths.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        rng_state: Tensor | None,
        cfg: AttentionConfig,
        ends: tuple[Tensor, Tensor] | None = None,
        longest: tuple[int, int] | None = None,
    ):
        self.device, self.type = query.device, _TYPES[query.dtype]
        _, self.heads, self.tokens, self.key_dim = query.shape
        self.kv_heads, self.value_dim = key.shape[1], value.shape[3]
        self.batch = query.shape[0] if ends is None else ends[0].shape[0] - 1
        self.q_len, self.kv_len = longest or (query.shape[2], key.shape[2])
        self.ends = ends
        # Returned weights may get gradients, and the backward must compute the same scores.
        self.with_mask = attn_mask is not None or cfg.return_weights or cfg.scale <= 0
        self.band = cfg.is_causal or cfg.window_left >= 0 or cfg.window_right >= 0
        self.has_dropout = cfg.dropout_p > 0
        self.given: dict[str, Tensor | None] = {
            "query": query, "key": key, "value": value, "attn_mask": attn_mask,
        }  # fmt: skip
        windows = (min(w, _LONGEST) for w in (cfg.window_left, cfg.window_right))
        rng_state = None if rng_state is None else rng_state.contiguous()
        self.padding, self.scale = key_padding_mask, cfg.scale
        self.dropout = (rng_state, cfg.dropout_p)
        self.rules = (cfg.is_causal, cfg.bottom_right, *windows)

    def give(self, **tensors: Tensor | None) -> None:
        """Name what the kernels read and write; see AttentionParams."""
        self.given.update(tensors)

    def forward(self) -> None:
        columns = 64 if max(self.key_dim, self.value_dim) <= 64 else _columns(self.value_dim)
        columns = max(columns, 64 if self.key_dim <= 64 else 128)
        self._run(
            "fwd", f"attention_forward<{self.type}, {columns}", self.value_dim,
            pieces=4 if columns == 64 else 2, switches=True,
        )  # fmt: skip

    def weights(self) -> None:
        """``weights``, or what ``grad_weights`` adds to ``delta``."""
        self._run("rows", f"attention_weights<{self.type}", switches=True)

    def backward(self) -> None:
        needs = [self.given[f"grad_{name}"] is not None for name in ("query", "key", "value")]
        tiles = -(-self.q_len // _TILE)
        rows = self.batch * self.heads * tiles * 3 * _TILE  # fa::RowStatistics
        self.give(rows=torch.empty(rows, dtype=torch.float32, device=self.device))
        self._run("rows", f"attention_delta<{self.type}>")
        if self.given["grad_weights"] is not None:
            self.weights()
        if needs[0] or self.given["grad_scores"] is not None:
            name = f"attention_grad_query<{self.type}, {_columns(self.key_dim)}"
            self._run("bwd", name, self.key_dim, switches=True)
        if needs[1] and needs[2] and max(self.key_dim, self.value_dim) <= 64:
            self._grad_key_value("64, 64", 64)
            return
        if needs[1]:
            self._grad_key_value(f"{_columns(self.key_dim)}, 0", self.key_dim)
        if needs[2]:
            self._grad_key_value(f"0, {_columns(self.value_dim)}", self.value_dim)

    def _grad_key_value(self, columns: str, dim: int) -> None:
        name = f"attention_grad_key_value<{self.type}, {columns}"
        self._run("bwd", name, dim, by_key=True, switches=True)

    def _run(
        self,
        file: str,
        name: str,
        dim: int = 0,
        *,
        pieces: int = 2,
        by_key: bool = False,
        switches: bool = False,
    ) -> None:
        """Launch a kernel over all tiles of queries, or keys, and 256 columns of ``dim`` each."""
        heads, length = (self.kv_heads, self.kv_len) if by_key else (self.heads, self.q_len)
        tiles = -(-length // _TILE)
        blocks = self.batch * heads * tiles
        if blocks == 0:
            return
        chosen = (self.band, self.with_mask, self.has_dropout) if switches else ()
        grid = (blocks, max(-(-dim // 256), 1), 1)
        _cuda.launch(self.device, _kernel(file, name, chosen, pieces), grid, self._pack(tiles))

    def _pack(self, tiles: int) -> bytes:
        given = self.given
        tensors: list[Any] = []
        for name in _TENSORS:
            tensors += _tensor(given.get(name), packed=self.ends is not None)
        mask, padding = given["attn_mask"], self.padding
        statistics = (
            (self.heads * self.tokens, self.tokens) if self.ends is None else (0, self.tokens)
        )
        return _PARAMS.pack(
            *tensors,
            *(given.get(name) for name in ("lse", "lse_low", "rows", "grad_lse")),
            padding,
            *(self.ends or (None, None)),
            *dropout_fields(*self.dropout),
            *statistics,
            *((0, 0) if padding is None else padding.stride()),
            self.scale,
            self.batch,
            self.heads,
            self.heads // self.kv_heads,
            self.q_len,
            self.kv_len,
            self.key_dim,
            self.value_dim,
            *self.rules,
            _mask_kind(mask),
            tiles,
            -(-self.q_len // _TILE),
        )


def _columns(dim: int) -> int:
    """The columns of a result that one block owns."""
    return 64 if dim <= 64 else 128 if dim <= 128 else 256


def _mask_kind(mask: Tensor | None) -> int:
    if mask is None:
        return _NO_MASK
    if mask.dtype == torch.bool:
        return _BOOL_MASK
    return _FLOAT_MASK if mask.dtype == torch.float32 else _OWN_MASK


def _tensor(x: Tensor | None, packed: bool) -> tuple[Any, ...]:
    """Values for fa::Tensor4."""
    if x is None:
        return None, 0, 0, 0, 0, 0, 0
    strides = [0 if n == 1 else s for s, n in zip(x.stride(), x.shape, strict=True)]
    quad = 4 * x.element_size()
    aligned = x.stride(3) == 1 and x.data_ptr() % quad == 0 and all(s % 4 == 0 for s in strides[:3])
    if packed:
        strides[0] = 0
    return x, *strides, aligned, 0
