"""Beam search: what others got wrong, on models whose every probability is known."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from examples.translation.config import SearchConfig
from examples.translation.data import BOS, EOS, PAD, PreparedCorpus
from examples.translation.search import beam_search, length_penalty
from examples.translation.translate import Translator


class Scripted:
    """A model whose next-token log probabilities are `table(sentence, prefix)`, a list of V."""

    training = False

    def __init__(self, table):
        self.table = table
        self.config = SimpleNamespace(positions="sinusoidal", max_positions=0)
        self.steps = 0

    def eval(self):
        return self

    def train(self, mode):
        return self

    def start(self, source, source_padding, beam):
        return ScriptedState(source[:, 0].tolist(), beam)

    def step(self, tokens, parents, state):
        self.steps += 1
        state.advance(tokens.tolist(), parents.tolist())
        rows = [
            [self.table(sentence, prefix) for prefix in prefixes]
            for sentence, prefixes in zip(state.sentences, state.prefixes, strict=True)
        ]
        return torch.tensor(rows)


class ScriptedState:
    def __init__(self, sentences, beam):
        self.sentences, self.prefixes = sentences, None
        self.beam = beam

    def advance(self, tokens, parents):
        if self.prefixes is None:
            assert all(token == BOS for row in tokens for token in row)
            self.prefixes = [[()] * self.beam for _ in tokens]
            return
        self.prefixes = [
            [old[parent] + (token,) for parent, token in zip(p, t, strict=True)]
            for old, p, t in zip(self.prefixes, parents, tokens, strict=True)
        ]

    def keep(self, rows):
        self.sentences = [self.sentences[row] for row in rows]
        self.prefixes = [self.prefixes[row] for row in rows]


A, B, C = 4, 5, 6


def script(rules, size=7, floor=-30.0):
    """A table from {prefix: {token: probability}}; what is not listed has almost none."""

    def table(_, prefix):
        row = [floor] * size
        for token, probability in rules.get(prefix, {EOS: 1.0}).items():
            row[token] = math.log(probability)
        return row

    return Scripted(table)


def search(model, length=3, n_best=1, sentences=1, **config):
    source = torch.arange(sentences)[:, None].expand(-1, length).contiguous()
    return beam_search(model, source, None, SearchConfig(**config), n_best)


def random_table(size, sharpness=1.0):
    """Random probabilities decided by sentence and prefix, the same in any batch and order."""

    def table(sentence, prefix):
        generator = torch.Generator().manual_seed(hash((sentence, prefix)) % 2**31)
        return (sharpness * torch.randn(size, generator=generator)).tolist()

    return table


def log_probability(table, sentence, tokens):
    """That of `tokens`, with pad and bos impossible."""
    total = 0.0
    for t, token in enumerate(tokens):
        logits = torch.tensor(table(sentence, tuple(tokens[:t])), dtype=torch.float64)
        logits[[PAD, BOS]] = -math.inf
        total += logits.log_softmax(0)[token].item()
    return total


def test_length_penalties_by_name():
    assert length_penalty(1, 0.6, "gnmt") == 1
    assert length_penalty(7, 0.6, "gnmt") == pytest.approx(2**0.6)
    assert length_penalty(7, 0.6, "average") == pytest.approx(7**0.6)
    assert length_penalty(7, 0.0, "gnmt") == length_penalty(7, 0.0, "average") == 1
    with pytest.raises(ValueError, match="'gnmt' or 'average', not 'wu'"):
        length_penalty(7, 0.6, "wu")


@pytest.mark.parametrize("kind", ["gnmt", "average"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_a_beam_wide_enough_finds_the_best_of_all(alpha, kind):
    """3 tokens besides EOS, at most 4 long: all 121 hypotheses scored by hand."""
    table = random_table(6)
    for sentence in range(5):
        every = [
            (*prefix, EOS)
            for length in range(4)
            for prefix in itertools.product([3, 4, 5], repeat=length)
        ]
        scores = {
            tokens: log_probability(table, sentence, tokens)
            / length_penalty(len(tokens), alpha, kind)
            for tokens in every
        }
        config = SearchConfig(beam=81, alpha=alpha, length_penalty=kind, extra_length=1)
        source = torch.full((1, 3), sentence)
        found = beam_search(Scripted(table), source, None, config, n_best=5)[0]
        expected = sorted(scores, key=scores.get, reverse=True)[:5]
        assert [hypothesis.tokens for hypothesis in found] == expected
        assert [h.score for h in found] == pytest.approx([scores[t] for t in expected])


def test_joeynmt_148_stops_only_when_no_live_hypothesis_can_win():
    """The top of the beam ends first; a longer one wins by the penalty later."""
    rules = {
        (): {A: 0.55, B: 0.45},
        (A,): {EOS: 0.6, C: 0.4},
        (B,): {B: 1.0},
        (B, B): {B: 1.0},
        (B, B, B): {EOS: 1.0},
    }
    best = search(script(rules), beam=2, alpha=1.0)[0][0]
    assert best.tokens == (B, B, B, EOS)
    assert best.score == pytest.approx(math.log(0.45) / 1.5)
    assert search(script(rules), beam=2, alpha=0.0)[0][0].tokens == (B, B, B, EOS)
    rules[B, B] = {B: 0.5, C: 0.5}
    assert search(script(rules), beam=2, alpha=0.0)[0][0].tokens == (A, EOS)


def test_joeynmt_148_stops_as_soon_as_no_live_hypothesis_can_win():
    model = script({(): {EOS: 0.97, A: 0.03}, (A,): {A: 1.0}, (A, A): {A: 1.0}})
    best = search(model, length=20, beam=2, alpha=0.6)[0][0]
    # log(.03) over the penalty of 70 tokens is still below log(.97).
    assert best.tokens == (EOS,) and model.steps == 1


def test_the_best_of_n_does_not_depend_on_n():
    table = random_table(9, sharpness=2.0)
    for sentence in range(10):
        source = torch.full((1, 4), sentence)
        config = SearchConfig(beam=4, extra_length=12)
        lists = [beam_search(Scripted(table), source, None, config, n)[0] for n in (1, 2, 4)]
        assert lists[0][0] == lists[1][0] == lists[2][0]
        assert [len(hypotheses) for hypotheses in lists] == [1, 2, 4]
        for hypotheses in lists:
            finished = [h.score for h in hypotheses if h.finished]
            assert finished == sorted(finished, reverse=True)
            assert len({h.tokens for h in hypotheses}) == len(hypotheses)


def test_opennmt_py_1345_nothing_finished_at_the_maximum_length():
    row = [-math.inf] * 4 + [math.log(0.7), math.log(0.3)]
    found = search(Scripted(lambda *_: row), length=2, n_best=2, beam=2, extra_length=3)[0]
    assert [h.finished for h in found] == [False, False]
    assert found[0].tokens == (A,) * 5
    assert EOS not in found[1].tokens and len(found[1].tokens) == 5
    expected = 5 * math.log(0.7)
    assert found[0].log_probability == pytest.approx(expected)
    assert found[0].score == pytest.approx(expected / length_penalty(5, 0.6))


def test_finished_hypotheses_come_before_unfinished_ones():
    rules = {(A,) * n: {A: 1.0} for n in range(1, 60)} | {(): {A: 0.9, EOS: 0.1}}
    model = script(rules, floor=-math.inf)
    found = search(model, length=1, n_best=2, beam=2, extra_length=2, alpha=0.0)[0]
    assert [h.tokens for h in found] == [(EOS,), (A, A, A)]
    assert found[0].score < found[1].score


def test_opennmt_tf_456_the_penalty_is_that_of_each_hypothesis_length():
    model = script({(): {A: 0.5, EOS: 0.5}, (A,): {B: 1.0}, (A, B): {EOS: 1.0}})
    found = search(model, n_best=2, beam=2, alpha=1.0)[0]
    by_tokens = {h.tokens: h.score for h in found}
    assert by_tokens[EOS,] == pytest.approx(math.log(0.5))
    assert by_tokens[A, B, EOS] == pytest.approx(math.log(0.5) / (8 / 6))


@pytest.mark.parametrize("beam", [5, 8, 50])
def test_fairseq_7_a_beam_wider_than_the_vocabulary(beam):
    table = random_table(5)
    found = search(Scripted(table), n_best=5, beam=beam, extra_length=2)[0]
    assert len(found) == 5
    for hypothesis in found:
        expected = log_probability(table, 0, hypothesis.tokens)
        assert hypothesis.log_probability == pytest.approx(expected, rel=1e-5)


def test_a_vocabulary_that_can_only_end():
    found = search(Scripted(lambda *_: [0.0, 0.0, 0.0]), n_best=2, beam=4)[0]
    assert [(h.tokens, h.finished) for h in found] == [((EOS,), True)]


def test_sockeye_233_exactly_one_eos():
    table = random_table(6, sharpness=0.5)
    for hypotheses in search(Scripted(table), sentences=8, n_best=4, beam=4, extra_length=9):
        for hypothesis in hypotheses:
            assert hypothesis.tokens.count(EOS) == int(hypothesis.finished)
            assert hypothesis.finished == (hypothesis.tokens[-1] == EOS)


def test_transformers_4290_pad_is_masked_before_the_log_softmax():
    """Pad and bos have most of the mass: neither is generated, nor takes a share of it."""

    def table(_, prefix):
        row = [9.0, 9.0, -30.0, -30.0, math.log(0.5), math.log(0.5)]
        return row if not prefix else [9.0, 9.0, 0.0, -30.0, -30.0, -30.0]

    found = search(Scripted(table), n_best=2, beam=2, alpha=0.0)[0]
    assert sorted(h.tokens for h in found) == [(4, EOS), (5, EOS)]
    assert [h.log_probability for h in found] == pytest.approx([math.log(0.5)] * 2, abs=1e-6)


def test_a_beam_of_one_is_greedy_search():
    table = random_table(8)
    for sentence in range(10):
        greedy = []
        while len(greedy) < 9 and (not greedy or greedy[-1] != EOS):
            logits = torch.tensor(table(sentence, tuple(greedy)))
            logits[[PAD, BOS]] = -math.inf
            greedy.append(int(logits.argmax()))
        config = SearchConfig(beam=1, extra_length=6)
        found = beam_search(Scripted(table), torch.full((1, 3), sentence), None, config)
        assert list(found[0][0].tokens) == greedy


def test_each_sentence_has_its_own_maximum_length():
    model = script({(A,) * n: {A: 1.0} for n in range(60)})
    padding = torch.tensor([[False] * 9, [False] * 2 + [True] * 7, [False] * 5 + [True] * 4])
    found = beam_search(model, torch.zeros(3, 9, dtype=torch.long), padding, SearchConfig(beam=2))
    assert [len(best[0].tokens) for best in found] == [59, 52, 55]
    assert model.steps == 59


def test_opennmt_py_318_fairseq_427_results_do_not_depend_on_the_batch():
    """Sentences that end at very different steps, alone and together."""
    table = random_table(9, sharpness=2.0)
    together = search(Scripted(table), sentences=16, n_best=2, beam=3, extra_length=20)
    for sentence in range(16):
        config = SearchConfig(beam=3, extra_length=20)
        alone = beam_search(Scripted(table), torch.full((1, 3), sentence), None, config, 2)
        assert [h.tokens for h in alone[0]] == [h.tokens for h in together[sentence]]


def test_opennmt_py_318_fairseq_427_the_same_text_for_batches_of_1_and_32(toy_run, toy_corpus):
    translator = Translator.load(toy_run)
    letters = PreparedCorpus(toy_corpus).split("val")
    lines = [translator.tokenizer.decode(letters.source[index]) for index in range(len(letters))]
    # Unseen lengths are where a model is unsure, and ties would show.
    lines += [" ".join("abcdefghij"[:n]) for n in range(1, 11)]
    found = {size: translator.search(lines, size, n_best=2) for size in (1, 5, 32)}
    for size in (5, 32):
        for expected, actual in zip(found[1], found[size], strict=True):
            assert [h.tokens for h in actual] == [h.tokens for h in expected]
            assert [h.score for h in actual] == pytest.approx([h.score for h in expected], 1e-4)


def test_the_score_is_the_models_own(toy_run, toy_corpus):
    translator = Translator.load(toy_run)
    source = torch.tensor([translator.tokenizer.encode("a c e g b") + [EOS]])
    best = beam_search(translator.model, source)[0][0]
    target = torch.tensor([[BOS, *best.tokens[:-1]]])
    with torch.no_grad():
        logits = translator.model(source, target)[0]
    logits[:, [PAD, BOS]] = -math.inf
    chosen = logits.log_softmax(-1)[torch.arange(len(best.tokens)), list(best.tokens)]
    assert best.log_probability == pytest.approx(chosen.sum().item(), rel=1e-4)
    assert best.score == pytest.approx(best.log_probability / length_penalty(len(best.tokens), 0.6))


def test_the_model_gets_its_mode_back(toy_run):
    model = Translator.load(toy_run).model
    for mode in (True, False):
        model.train(mode)
        beam_search(model, torch.tensor([[5, 6, EOS]]))
        assert model.training == mode


def test_no_sentences_no_hypotheses():
    assert beam_search(script({}), torch.zeros(0, 3, dtype=torch.long)) == []


@pytest.mark.parametrize("n_best", [0, 5])
def test_n_best_within_the_beam(n_best):
    with pytest.raises(ValueError, match=f"n_best must be in 1 .. beam = 4, not {n_best}"):
        search(script({}), n_best=n_best)
