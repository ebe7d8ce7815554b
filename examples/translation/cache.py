"""What incremental decoding remembers: keys and values of earlier positions, never moved.

K hypotheses a sentence live in K slots of every position. When the search lets slot 2 continue
slot 0, nothing is copied: each hypothesis attends to all slots of its sentence under a mask that
shows it its own ancestors. Keys and values of the source are stored once a sentence.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one decoder layer, for B sentences with K slots.

    `memory_key` [B, h, S, d_k] and `memory_value` [B, h, S, d_v] are those of the encoder's output.
    """

    def __init__(self, memory_key: Tensor, memory_value: Tensor):
        self.memory_key, self.memory_value = memory_key, memory_value
        self.length = 0
        self._key: Tensor | None = None  # [B, capacity, K, h, d_k]
        self._value: Tensor | None = None  # [B, capacity, K, h, d_v]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds one position, key [B, h, K, d_k] and value [B, h, K, d_v], and returns all:
        [B, h, L*K, d_k] and [B, h, L*K, d_v], slot s of position t at t*K + s."""
        self._key = self._stored(self._key, key)
        self._value = self._stored(self._value, value)
        self.length += 1
        return self._seen(self._key), self._seen(self._value)

    def keep(self, rows: Tensor) -> None:
        """Keeps the sentences `rows` [b] (int64) alone."""
        self.memory_key, self.memory_value = self.memory_key[rows], self.memory_value[rows]
        if self._key is not None and self._value is not None:
            self._key, self._value = self._key[rows], self._value[rows]

    def _stored(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        batch, heads, slots, dim = new.shape
        if buffer is None:
            buffer = new.new_zeros(batch, 16, slots, heads, dim)
        elif self.length == buffer.shape[1]:
            buffer = torch.cat([buffer, torch.zeros_like(buffer)], 1)
        buffer[:, self.length] = new.transpose(1, 2)
        return buffer

    def _seen(self, buffer: Tensor) -> Tensor:
        return buffer[:, : self.length].flatten(1, 2).transpose(1, 2)


class DecoderState:
    """All layers' caches, and which slots each hypothesis descends from."""

    def __init__(self, layers: list[LayerCache], memory_padding: Tensor | None, beam: int):
        self.layers, self.memory_padding, self.beam = layers, memory_padding, beam
        self._ancestors: Tensor | None = None  # bool [B, K, L, K]

    @property
    def length(self) -> int:
        """Positions decoded so far."""
        return self.layers[0].length

    def advance(self, parents: Tensor) -> Tensor | None:
        """The mask of the next position, where slot k of a sentence continues slot parents[b, k].

        bool [B, 1, K, (L+1)*K], True = ancestor or itself; None where there is one slot.
        """
        if self.beam == 1:
            return None
        batch = len(parents)
        itself = torch.eye(self.beam, dtype=torch.bool, device=parents.device)
        itself = itself[None, :, None].expand(batch, -1, -1, -1)
        if self._ancestors is None:
            self._ancestors = itself
        else:
            rows = torch.arange(batch, device=parents.device)[:, None]
            self._ancestors = torch.cat([self._ancestors[rows, parents], itself], 2)
        return self._ancestors.flatten(2)[:, None]

    def keep(self, rows: Tensor) -> None:
        """Keeps the sentences `rows` [b] (int64) alone."""
        for layer in self.layers:
            layer.keep(rows)
        if self.memory_padding is not None:
            self.memory_padding = self.memory_padding[rows]
        if self._ancestors is not None:
            self._ancestors = self._ancestors[rows]
