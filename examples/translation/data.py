"""The prepared corpus as the model sees it: ids on disk, batches by tokens, padded tensors.

A prepared folder (written by `prepare`) holds

    manifest.json       what is in here, counted and hashed (the keys: see prepare.py)
    spm.model           one sentencepiece BPE model for both languages:
                        pad 0, bos 1, eos 2, unk 3
    {train,val}.{src,tgt}.bin
                        token ids, one sentence after the other, without bos and eos
    {train,val}.{src,tgt}.idx.npy
                        int64 [pairs + 1], where each sentence starts
    test.src, test.tgt  raw text, one sentence a line

Every length in this module counts the closing EOS.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
import torch

from examples.translation.lines import clean

FORMAT = 1
PAD, BOS, EOS, UNK = 0, 1, 2, 3


class CorpusError(ValueError):
    """A prepared folder that can't be used, in one sentence."""


class Tokenizer:
    """Text to subword ids and back, with the corpus's sentencepiece model."""

    def __init__(self, model_file: str | Path):
        if not Path(model_file).is_file():
            raise CorpusError(f"no subword model at {model_file}")
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(model_file))

    @property
    def vocab_size(self) -> int:
        return self._model.get_piece_size()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without bos and eos; empty for text without a visible character."""
        return self._model.encode(clean(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts, on all cores."""
        return self._model.encode([clean(text) for text in texts], num_threads=-1)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; pad, bos and eos leave no trace."""
        return self._model.decode([int(i) for i in ids])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each id's subword as written in the vocabulary ("▁" marks the start of a word)."""
        return [self._model.id_to_piece(int(i)) for i in ids]


class Sentences:
    """One side of a split: memory-mapped ids and where each sentence starts."""

    def __init__(self, prefix: str | Path, dtype: str):
        binary, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx.npy")
        for file in (binary, index):
            if not file.is_file():
                raise CorpusError(f"the prepared corpus lacks {file}")
        self.offsets = np.load(index)
        expected = int(self.offsets[-1]) * np.dtype(dtype).itemsize
        if binary.stat().st_size != expected:
            raise CorpusError(
                f"{binary} has {binary.stat().st_size} bytes, its index says {expected}: "
                "prepare again"
            )
        self.ids = np.memmap(binary, dtype, "r") if expected else np.empty(0, dtype)
        self.lengths = np.diff(self.offsets) + 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.asarray(self.ids[self.offsets[index] : self.offsets[index + 1]])


class ParallelIds:
    """Aligned source and target sentences of one split."""

    def __init__(self, source: Sentences, target: Sentences):
        if len(source) != len(target):
            raise CorpusError(f"{len(source)} source sentences, but {len(target)} target sentences")
        self.source, self.target = source, target

    def __len__(self) -> int:
        return len(self.source)

    @property
    def source_lengths(self) -> np.ndarray:
        """int64 [pairs], EOS counted."""
        return self.source.lengths

    @property
    def target_lengths(self) -> np.ndarray:
        """int64 [pairs], EOS counted."""
        return self.target.lengths


class PreparedCorpus:
    """A folder written by `python -m examples.translation.prepare`.

    Raises CorpusError where the folder is missing, of another format, or contradicts itself.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        file = self.path / "manifest.json"
        if not file.is_file():
            raise CorpusError(
                f"{self.path} is no prepared corpus (it has no manifest.json): "
                "make one with python -m examples.translation.prepare"
            )
        self.manifest: dict[str, Any] = json.loads(file.read_text("utf-8"))
        if self.manifest.get("format") != FORMAT:
            raise CorpusError(
                f"{file} has format {self.manifest.get('format')}, this code reads {FORMAT}: "
                "prepare again"
            )
        self.tokenizer = Tokenizer(self.path / "spm.model")
        if self.tokenizer.vocab_size != self.vocab_size:
            raise CorpusError(
                f"{file} says vocab_size {self.vocab_size}, but {self.path / 'spm.model'} has "
                f"{self.tokenizer.vocab_size} pieces: prepare again"
            )

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    def split(self, name: str) -> ParallelIds:
        """The ids of ``"train"`` or ``"val"``."""
        if name not in ("train", "val"):
            raise CorpusError(f"split must be 'train' or 'val', not {name!r} (test is text)")
        dtype = self.manifest["id_dtype"]
        sides = [Sentences(self.path / f"{name}.{side}", dtype) for side in ("src", "tgt")]
        pairs = ParallelIds(*sides)
        stated = self.manifest["splits"][name]["pairs"]
        if len(pairs) != stated:
            raise CorpusError(
                f"{name} holds {len(pairs)} pairs, the manifest says {stated}: prepare again"
            )
        return pairs


class TokenBatches:
    """Batches of at most `max_tokens` source slots and as many target slots, padding included.

    Sentences of like length share a batch, so little of it is padding. Pairs with a side longer
    than `max_length` (EOS counted) are left out; `skipped` counts them. Raises ValueError where
    no pair stays, or one that stays fits into no batch.
    """

    def __init__(self, ids: ParallelIds, max_tokens: int, seed: int, max_length: int):
        longest = np.maximum(ids.source_lengths, ids.target_lengths)
        self._kept = np.flatnonzero(longest <= max_length)
        self.skipped = len(ids) - len(self._kept)
        if len(self._kept) == 0:
            raise ValueError(f"no pair of at most max_length={max_length} tokens among {len(ids)}")
        if longest[self._kept].max() > max_tokens:
            raise ValueError(
                f"max_tokens={max_tokens} is too small for a pair of "
                f"{longest[self._kept].max()} tokens: raise max_tokens or lower max_length"
            )
        self._source_lengths, self._target_lengths = ids.source_lengths, ids.target_lengths
        self.max_tokens, self.seed, self.max_length = max_tokens, seed, max_length

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Index arrays (int64) that hold every kept pair once, decided by (seed, epoch) alone."""
        random = np.random.default_rng((self.seed, epoch))
        order = random.permutation(self._kept)
        source, target = self._source_lengths[order], self._target_lengths[order]
        # By the longer side, then by the source: on Multi30k 95% of both sides' slots hold a token.
        order = order[np.lexsort((source, np.maximum(source, target)))]
        batches = self._cut(order)
        return [batches[i] for i in random.permutation(len(batches))]

    def _cut(self, order: np.ndarray) -> list[np.ndarray]:
        longest = np.maximum(self._source_lengths[order], self._target_lengths[order]).tolist()
        starts, width = [0], 0
        for position, length in enumerate(longest):
            width = max(width, length)
            if width * (position + 1 - starts[-1]) > self.max_tokens:
                starts.append(position)
                width = length
        return np.split(order, starts[1:])


class Batch(NamedTuple):
    """Padded tensors of B pairs, S source and T target slots."""

    source: torch.Tensor  # [B, S] int64: tokens, EOS, then pad
    source_padding: torch.Tensor  # [B, S] bool: True = pad
    target_in: torch.Tensor  # [B, T] int64: BOS, tokens, then pad
    target_out: torch.Tensor  # [B, T] int64: tokens, EOS, then pad
    num_target_tokens: int  # target tokens without padding, EOS counted
    num_source_tokens: int

    def to(self, device: torch.device | str) -> Batch:
        tensors = (value.to(device, non_blocking=True) for value in self[:4])
        return Batch(*tensors, *self[4:])


def collate(ids: ParallelIds, indices: np.ndarray | Sequence[int]) -> Batch:
    """The pairs at `indices` as one padded batch."""
    indices = np.asarray(indices, dtype=np.int64)
    source, source_lengths = _padded(ids.source, indices)
    target, target_lengths = _padded(ids.target, indices)
    rows, last = np.arange(len(indices)), source_lengths - 1
    source[rows, last] = EOS
    target_in = np.full_like(target, BOS)
    target_in[:, 1:] = target[:, :-1]
    target[rows, target_lengths - 1] = EOS
    padding = np.arange(source.shape[1]) >= source_lengths[:, None]
    return Batch(
        torch.from_numpy(source),
        torch.from_numpy(padding),
        torch.from_numpy(target_in),
        torch.from_numpy(target),
        int(target_lengths.sum()),
        int(source_lengths.sum()),
    )


def _padded(side: Sentences, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([B, longest] int64 tokens then pad, with a free slot for EOS; [B] lengths, EOS counted)."""
    lengths = side.lengths[indices]
    tokens = lengths - 1
    padded = np.full((len(indices), int(lengths.max())), PAD, np.int64)
    ends = np.cumsum(tokens)
    positions = np.repeat(side.offsets[indices] - (ends - tokens), tokens) + np.arange(ends[-1])
    padded[np.arange(padded.shape[1]) < tokens[:, None]] = side.ids[positions]
    return padded, lengths


class IdWriter:
    """Writes one side of a split, `prefix`.bin and `prefix`.idx.npy, sentence by sentence."""

    def __init__(self, prefix: str | Path, dtype: str):
        self._prefix, self._dtype = prefix, dtype
        self._lengths: list[int] = []
        self._file = open(f"{prefix}.bin", "wb")

    def write(self, ids: Sequence[int]) -> None:
        np.asarray(ids, self._dtype).tofile(self._file)
        self._lengths.append(len(ids))

    def close(self) -> int:
        """Writes the index; returns the number of tokens, one EOS a sentence counted."""
        self._file.close()
        offsets = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64)
        np.save(f"{self._prefix}.idx.npy", offsets)
        return int(offsets[-1]) + len(self._lengths)
