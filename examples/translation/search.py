"""Batched beam search over cached keys and values (paper section 6.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from examples.translation.config import SearchConfig
from examples.translation.data import BOS, EOS, PAD
from examples.translation.model import Transformer


@dataclass(frozen=True)
class Hypothesis:
    """One translation: `tokens` end in their only EOS where `finished`."""

    tokens: tuple[int, ...]
    score: float  # log_probability / length penalty of len(tokens)
    log_probability: float
    finished: bool


def length_penalty(length: int, alpha: float, kind: str = "gnmt") -> float:
    """((5 + length) / 6)^alpha for "gnmt" (the paper), length^alpha for "average" (Marian).

    `length` counts EOS, and belongs to the hypothesis, not to the step of the search.
    """
    if kind == "gnmt":
        return ((5 + length) / 6) ** alpha
    if kind == "average":
        return float(length) ** alpha
    raise ValueError(f"length penalty must be 'gnmt' or 'average', not {kind!r}")


@torch.no_grad()
def beam_search(
    model: Transformer,
    source: Tensor,
    source_padding: Tensor | None = None,
    config: SearchConfig | None = None,
    n_best: int = 1,
) -> list[list[Hypothesis]]:
    """The best `n_best` hypotheses of each sentence, best first.

    source: [B, S] int64, each sentence ending in EOS, then pad; source_padding: bool, True = pad.

    - A candidate that ends in EOS is finished if it is among the `beam` best of its step, and then
      leaves the beam; the `beam` best others go on. A beam of 1 is greedy search: it ends there.
    - A sentence ends when no hypothesis that goes on could still beat its `n_best`-th finished one
      at any length, or at source length + extra_length tokens, EOS counted in both. So the best
      hypothesis does not depend on `n_best`.
    - Where fewer than `n_best` are finished by then, unfinished ones follow, at most `beam` in all.

    Raises ValueError where `n_best` is not in 1 .. beam.
    """
    config = SearchConfig() if config is None else config
    if not 1 <= n_best <= config.beam:
        raise ValueError(f"n_best must be in 1 .. beam = {config.beam}, not {n_best}")
    if len(source) == 0:
        return []
    was_training = model.training
    model.eval()
    search = _Search(model, source, source_padding, config, n_best)
    while not search.step():
        pass
    model.train(was_training)
    return [sentence.best(n_best) for sentence in search.sentences]


@dataclass
class _Sentence:
    """The finished hypotheses of one sentence, and when it is over."""

    max_length: int
    config: SearchConfig
    done: bool = False
    finished: list[Hypothesis] = field(default_factory=list)
    unfinished: list[Hypothesis] = field(default_factory=list)

    def hypothesis(self, tokens: Sequence[int], log_probability: float) -> Hypothesis:
        penalty = length_penalty(len(tokens), self.config.alpha, self.config.length_penalty)
        ended = tokens[-1] == EOS
        return Hypothesis(tuple(tokens), log_probability / penalty, log_probability, ended)

    def is_decided(self, best_live: float, n_best: int) -> bool:
        """Whether no continuation of a log probability of at most `best_live` can matter."""
        if len(self.finished) < n_best:
            return best_live == -torch.inf
        if self.config.beam == 1:
            return True
        # A log probability only falls, and no penalty is larger than that of the longest output.
        longest = length_penalty(self.max_length, self.config.alpha, self.config.length_penalty)
        return self.best(n_best)[-1].score >= best_live / longest

    def best(self, count: int) -> list[Hypothesis]:
        by_score = [
            sorted(group, key=lambda hypothesis: -hypothesis.score)
            for group in (self.finished, self.unfinished)
        ]
        return (by_score[0] + by_score[1])[:count]


class _Search:
    """All sentences' beams, advanced together. Rows are the sentences still in the tensors."""

    def __init__(
        self,
        model: Transformer,
        source: Tensor,
        source_padding: Tensor | None,
        config: SearchConfig,
        n_best: int,
    ):
        self.model, self.config, self.n_best = model, config, n_best
        batch, width = source.shape
        lengths = [width] * batch if source_padding is None else (~source_padding).sum(1).tolist()
        limit = model.config.max_positions if model.config.positions == "learned" else None
        self.sentences = [
            _Sentence(min(n + config.extra_length, limit or n + config.extra_length), config)
            for n in lengths
        ]
        self.rows = list(range(batch))
        self.state = model.start(source, source_padding, config.beam)
        shape = (batch, config.beam)
        self.tokens = source.new_full(shape, BOS)
        self.parents = source.new_zeros(shape)
        self.history = source.new_empty((*shape, 0))
        # Before the first step all slots hold the same empty hypothesis: one of them counts.
        self.live = torch.full(shape, -torch.inf, dtype=torch.float64, device=source.device)
        self.live[:, 0] = 0

    def step(self) -> bool:
        """Lengthens every hypothesis by one token; returns whether all sentences are done."""
        scores, slots, tokens = self._candidates()
        self._collect_finished(scores, slots, tokens)
        best = scores.masked_fill(tokens == EOS, -torch.inf).topk(self.config.beam)
        self.live = best.values
        self.parents = slots.gather(1, best.indices)
        self.tokens = tokens.gather(1, best.indices)
        grown = self.history.gather(1, self.parents[..., None].expand_as(self.history))
        self.history = torch.cat([grown, self.tokens[..., None]], 2)
        self._end_sentences()
        return self._drop_done()

    def _candidates(self) -> tuple[Tensor, Tensor, Tensor]:
        """The 2 * beam best continuations of each row, best first: (log probability, slot, token),
        each [B, 2K]. Twice the beam, so that K remain where K end in EOS; missing ones are -inf."""
        beam = self.config.beam
        logits = self.model.step(self.tokens, self.parents, self.state)
        logits[..., [PAD, BOS]] = -torch.inf
        best = logits.log_softmax(-1).topk(min(2 * beam, logits.shape[-1]))
        scores = (self.live[..., None] + best.values).flatten(1)
        if scores.shape[1] < 2 * beam:
            missing = 2 * beam - scores.shape[1]
            scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
        chosen = scores.topk(2 * beam)
        places = chosen.indices.clamp(max=best.indices[0].numel() - 1)
        tokens = best.indices.flatten(1).gather(1, places)
        return chosen.values, places // best.indices.shape[-1], tokens

    def _collect_finished(self, scores: Tensor, slots: Tensor, tokens: Tensor) -> None:
        beam = self.config.beam
        ended = (tokens[:, :beam] == EOS) & (scores[:, :beam] > -torch.inf)
        for row, rank in ended.nonzero().tolist():
            sentence = self.sentences[self.rows[row]]
            if not sentence.done:
                prefix = self.history[row, slots[row, rank]].tolist()
                found = sentence.hypothesis([*prefix, EOS], float(scores[row, rank]))
                sentence.finished.append(found)

    def _end_sentences(self) -> None:
        length = self.history.shape[2]
        for row, best_live in enumerate(self.live[:, 0].tolist()):
            sentence = self.sentences[self.rows[row]]
            if sentence.done:
                continue
            sentence.done = sentence.is_decided(best_live, self.n_best)
            if not sentence.done and length == sentence.max_length:
                sentence.done = True
                for tokens, live in zip(
                    self.history[row].tolist(), self.live[row].tolist(), strict=True
                ):
                    if live > -torch.inf:
                        sentence.unfinished.append(sentence.hypothesis(tokens, live))

    def _drop_done(self) -> bool:
        """Removes done sentences once they are a quarter of the rows: fewer, larger copies."""
        going = [row for row, s in enumerate(self.rows) if not self.sentences[s].done]
        if not going:
            return True
        if len(going) <= 0.75 * len(self.rows):
            keep = torch.tensor(going, device=self.live.device)
            self.state.keep(keep)
            self.tokens, self.parents = self.tokens[keep], self.parents[keep]
            self.live, self.history = self.live[keep], self.history[keep]
            self.rows = [self.rows[row] for row in going]
        return False
