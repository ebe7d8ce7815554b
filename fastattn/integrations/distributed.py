"""Attention of ``torch.distributed.tensor``'s DTensors, split by batch or by heads.

    import fastattn.integrations.distributed

registers how ``fastattn.scaled_dot_product_attention`` may be split, so that each process computes
its own sequences or its own heads (tensor parallelism) and nothing is sent. Both are split by even
shares only. A call with dropout is not split, for its mask depends on the number of the head; it
needs ``rng_state`` as a replicated DTensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

Option = tuple[list[Any], list[Any]]  # placements of the results, and of the arguments
_BATCH, _HEADS = 0, 1
_DROPOUT = 5  # where dropout_p stands among the eight numbers that follow the tensors


@register_sharding(torch.ops.fastattn.attention.default)
def _attention(query: Any, key: Any, value: Any, mask: Any, padding: Any, rng: Any, *rest: Any):
    numbers = list(rest)
    options = [_forward_option(None, query, key, mask, padding, rng, numbers)]
    for dim in _splits(query, key, numbers[_DROPOUT]):
        options.append(_forward_option(dim, query, key, mask, padding, rng, numbers))
    return options


@register_sharding(torch.ops.fastattn.attention_backward.default)
def _attention_backward(
    grad_output: Any, grad_lse: Any, grad_weights: Any, query: Any, key: Any, value: Any, mask: Any,
    padding: Any, rng: Any, output: Any, lse: Any, lse_low: Any, *rest: Any,
):  # fmt: skip
    numbers, needs = list(rest), rest[-2]
    options = []
    for dim in (None, *_splits(query, key, numbers[_DROPOUT])):
        split = _place(dim)
        masked, padded = _mask_places(dim, mask, padding)
        wanted = [split if need else Replicate() for need in needs[:3]]
        summed = Partial() if dim is not None and masked == Replicate() else masked
        wanted.append(summed if needs[3] and mask is not None else Replicate())
        grads = [None if x is None else split for x in (grad_output, grad_lse, grad_weights)]
        given = [*grads, split, split, split, masked, padded, _whole(rng), split, split, split]
        options.append((wanted, given + [None] * len(numbers)))
    return options


def _forward_option(
    dim: int | None, query: Any, key: Any, mask: Any, padding: Any, rng: Any, numbers: list[Any]
) -> Option:
    split = _place(dim)
    masked, padded = _mask_places(dim, mask, padding)
    weights = split if numbers[6] else Replicate()
    given = [split, split, split, masked, padded, _whole(rng)]
    return [split, split, split, weights], given + [None] * len(numbers)


def _splits(query: Any, key: Any, dropout_p: float) -> list[int]:
    """The dimensions by which the processes may share the work evenly."""
    if dropout_p > 0:
        return []
    size = query.mesh.size()
    return [dim for dim in (_BATCH, _HEADS)
            if query.shape[dim] % size == 0 and key.shape[dim] % size == 0]  # fmt: skip


def _place(dim: int | None) -> Any:
    return Replicate() if dim is None else Shard(dim)


def _whole(x: Any) -> Any:
    return None if x is None else Replicate()


def _mask_places(dim: int | None, mask: Any, padding: Any) -> tuple[Any, Any]:
    """A mask is whole where it broadcasts; padding [B, Lk] is the same for all heads."""
    masked = padded = None
    if mask is not None:
        masked = Replicate() if dim is None or mask.shape[dim] == 1 else Shard(dim)
    if padding is not None:
        padded = Shard(_BATCH) if dim == _BATCH else Replicate()
    return masked, padded
