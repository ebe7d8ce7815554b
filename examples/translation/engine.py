"""The training engine: updates of a given number of tokens, and all that a run resumes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fastattn
from examples.translation.config import Config
from examples.translation.data import (
    PAD,
    Batch,
    ParallelIds,
    PreparedCorpus,
    TokenBatches,
    collate,
)
from examples.translation.model import Transformer
from examples.translation.optim import adam, learning_rate, set_learning_rate

# Changing these on resume leaves every update as it would have been.
_FREE_ON_RESUME = frozenset(
    ["max_steps", "checkpoint_steps", "keep_checkpoints", "validate_steps", "log_steps"]
)


class TrainingError(RuntimeError):
    """A run that can't start or go on, in one sentence."""


class Update(NamedTuple):
    """What one optimizer step saw."""

    loss: float  # per target token, smoothed
    nll: float  # per target token, un-smoothed
    grad_norm: float
    tokens: int


class UpdateStream:
    """Micro-batches grouped into updates of about `tokens_per_update` target tokens, for ever.

    An update takes micro-batches until one more would take it further from that number. `position`,
    (epoch, index) of the next micro-batch, is all that a resumed run needs.
    """

    def __init__(
        self,
        batches: TokenBatches,
        ids: ParallelIds,
        tokens_per_update: int,
        position: Sequence[int] = (0, 0),
    ):
        self._batches, self._lengths = batches, ids.target_lengths
        self._wanted = tokens_per_update
        self._epoch, self._index = position
        self._current = batches.epoch(self._epoch)

    @property
    def position(self) -> tuple[int, int]:
        return self._epoch, self._index

    @property
    def epochs(self) -> float:
        """Passes over the data so far."""
        return self._epoch + self._index / len(self._current)

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        return self

    def __next__(self) -> list[np.ndarray]:
        update: list[np.ndarray] = []
        total = 0
        while True:
            if self._index == len(self._current):
                self._epoch, self._index = self._epoch + 1, 0
                self._current = self._batches.epoch(self._epoch)
            indices = self._current[self._index]
            tokens = int(self._lengths[indices].sum())
            if update and total + tokens / 2 > self._wanted:
                return update
            update.append(indices)
            total += tokens
            self._index += 1


def batch_loss(model: Transformer, batch: Batch, config: Config) -> tuple[Tensor, Tensor]:
    """(smoothed loss, un-smoothed loss) of a batch, summed over its target tokens, EOS included.

    A model in eval mode gets no smoothing.
    """
    training = config.training
    # Without a padded position the attention needs no mask, and takes a faster path.
    padding = batch.source_padding if batch.num_source_tokens < batch.source.numel() else None
    with torch.autocast(
        batch.source.device.type, torch.bfloat16, enabled=training.precision == "bf16"
    ):
        memory = model.encode(batch.source, padding)
        hidden = model.decode(batch.target_in, memory, padding)
        return fastattn.linear_cross_entropy(
            hidden.flatten(0, 1),
            model.embedding.weight,
            batch.target_out.flatten(),
            label_smoothing=training.label_smoothing if model.training else 0.0,
            smoothing=training.smoothing,
            ignore_index=PAD,
            reduction="sum",
            return_nll=True,
        )


class Engine:
    """Model, optimizer, random state and position in the data: what makes the next update.

    Raises TrainingError where the corpus has another vocabulary size than the config.
    """

    def __init__(self, config: Config, corpus: PreparedCorpus, device: str | torch.device = "cpu"):
        self.device = torch.device(device)
        self.config = config = settled(config, corpus, self.device)
        training = config.training
        self.ids = corpus.split("train")
        self.batches = TokenBatches(
            self.ids, training.max_tokens, training.seed, training.max_length
        )
        self.stream = UpdateStream(self.batches, self.ids, training.tokens_per_update)
        torch.manual_seed(training.seed)
        self.model = Transformer(config.model).to(self.device)
        self.optimizer = adam(self.model.parameters(), training)
        self.step = 0
        self.target_tokens = 0

    def update(self, micro_batches: Sequence[np.ndarray]) -> Update:
        """One optimizer step on the micro-batches together, whatever their sizes.

        The loss is their sum over all target tokens divided by the number of those tokens.
        Raises TrainingError, with the weights untouched, where loss or gradient is not finite.
        """
        training = self.config.training
        tokens = int(sum(self.ids.target_lengths[indices].sum() for indices in micro_batches))
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(2, device=self.device)
        for indices in micro_batches:
            batch = collate(self.ids, indices).to(self.device)
            loss, nll = batch_loss(self.model, batch, self.config)
            (loss / tokens).backward()
            sums += torch.stack([loss.detach(), nll.detach()])
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        # The only point where the host waits for the device.
        loss, nll, norm = torch.cat([sums / tokens, norm[None]]).tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(f"step {self.step + 1} has loss {loss} and gradient norm {norm}")
        rate = learning_rate(
            self.step + 1, self.config.model.d_model, training.warmup_steps, training.lr_factor
        )
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.step += 1
        self.target_tokens += tokens
        return Update(loss, nll, norm, tokens)

    def state(self) -> dict[str, Any]:
        """Everything that decides what comes next, as tensors, numbers, text, lists and dicts."""
        on_gpu = self.device.type == "cuda"
        return {
            "config": dataclasses.asdict(self.config),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "target_tokens": self.target_tokens,
            "position": list(self.stream.position),
            "pairs": len(self.ids),
            "random_cpu": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if on_gpu else [],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes back to `state`. Raises TrainingError where it is of another config or corpus."""
        changed = _differences(state["config"], dataclasses.asdict(self.config))
        if changed:
            raise TrainingError(f"the run was started with {changed}")
        if state["pairs"] != len(self.ids):
            raise TrainingError(
                f"the run was started on {state['pairs']} pairs, this corpus has {len(self.ids)}"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.target_tokens = state["step"], state["target_tokens"]
        self.stream = UpdateStream(
            self.batches, self.ids, self.config.training.tokens_per_update, state["position"]
        )
        torch.set_rng_state(state["random_cpu"])
        if self.device.type == "cuda" and state["random_cuda"]:
            torch.cuda.set_rng_state_all(state["random_cuda"])


@torch.no_grad()
def validation_loss(model: Transformer, ids: ParallelIds, config: Config) -> float:
    """Un-smoothed loss per target token of `ids`, in nats."""
    was_training = model.training
    model.eval()
    device = model.embedding.weight.device
    longest = int(np.maximum(ids.source_lengths, ids.target_lengths).max())
    batches = TokenBatches(ids, max(config.training.max_tokens, longest), 0, longest)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for indices in batches.epoch(0):
        total += batch_loss(model, collate(ids, indices).to(device), config)[1]
    model.train(was_training)
    return float(total) / int(ids.target_lengths.sum())


def settled(config: Config, corpus: PreparedCorpus, device: torch.device) -> Config:
    """The config with what it leaves to the corpus and the device.

    Raises TrainingError where its vocabulary size is not the corpus's.
    """
    given, actual = config.model.vocab_size, corpus.vocab_size
    if given not in (None, actual):
        raise TrainingError(
            f"vocab_size is {given} in the config, but {actual} in {corpus.path}: prepare again "
            f"or pass --set vocab_size={actual}"
        )
    model = dataclasses.replace(config.model, vocab_size=actual)
    training = config.training
    if training.precision == "auto":
        precision = "bf16" if has_bf16_products(device) else "fp32"
        training = dataclasses.replace(training, precision=precision)
    return dataclasses.replace(config, model=model, training=training)


def has_bf16_products(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices by instructions of its own."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # torch before 2.9 can't tell; then the answer is no, which is slower but right.
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _differences(saved: dict[str, Any], given: dict[str, Any]) -> str:
    changed = []
    for table in ("model", "training"):
        for key in saved[table].keys() | given[table].keys():
            old, new = saved[table].get(key), given[table].get(key)
            if old != new and key not in _FREE_ON_RESUME:
                changed.append(f"{key} = {old}, not {new}")
    return ", ".join(sorted(changed))
