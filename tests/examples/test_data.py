"""The prepared folder and its batches."""

from __future__ import annotations

import json

import numpy as np
import pytest
import sentencepiece
import torch

from examples.translation import data

VOCAB = 60


def write_ids(prefix, sentences, dtype="uint16"):
    writer = data.IdWriter(prefix, dtype)
    for sentence in sentences:
        writer.write(sentence)
    return writer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A prepared folder of 200 random "sentences" of 0 to 29 tokens, without a test set."""
    path = tmp_path_factory.mktemp("prepared")
    random = np.random.default_rng(3)
    text = ["".join(random.choice(list("abcdefg hijk"), 40)) for _ in range(50)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_prefix=str(path / "spm"),
        vocab_size=VOCAB,
        model_type="bpe",
        pad_id=data.PAD,
        bos_id=data.BOS,
        eos_id=data.EOS,
        unk_id=data.UNK,
        minloglevel=2,
    )
    for side in ("src", "tgt"):
        ids = [random.integers(4, VOCAB, random.integers(0, 30)) for _ in range(200)]
        write_ids(path / f"train.{side}", ids)
    splits = {"train": {"pairs": 200}}
    manifest = {
        "format": data.FORMAT,
        "vocab_size": VOCAB,
        "id_dtype": "uint16",
        "splits": splits,
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.fixture
def pairs(folder):
    return data.PreparedCorpus(folder).split("train")


def altered(folder, tmp_path, **changes):
    """A copy of `folder` whose manifest has `changes`."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def test_lengths_count_eos(pairs):
    assert len(pairs) == 200
    assert [len(pairs.source[i]) + 1 for i in range(200)] == pairs.source_lengths.tolist()
    assert [len(pairs.target[i]) + 1 for i in range(200)] == pairs.target_lengths.tolist()


def test_collate_equals_a_loop(pairs):
    indices = [7, 0, 199, 42]
    batch = data.collate(pairs, indices)
    for row, index in enumerate(indices):
        source = [*pairs.source[index].tolist(), data.EOS]
        target = pairs.target[index].tolist()
        pad = [data.PAD] * (batch.source.shape[1] - len(source))
        assert batch.source[row].tolist() == source + pad
        assert batch.source_padding[row].tolist() == [False] * len(source) + [True] * len(pad)
        pad = [data.PAD] * (batch.target_in.shape[1] - len(target) - 1)
        assert batch.target_in[row].tolist() == [data.BOS, *target, *pad]
        assert batch.target_out[row].tolist() == [*target, data.EOS, *pad]
    assert batch.num_target_tokens == int(pairs.target_lengths[indices].sum())
    assert batch.num_source_tokens == int(pairs.source_lengths[indices].sum())
    assert batch.source.dtype == batch.target_in.dtype == batch.target_out.dtype == torch.int64
    assert batch.source_padding.dtype == torch.bool


def test_collate_of_empty_sentences(tmp_path):
    for side in ("a", "b"):
        write_ids(tmp_path / side, [[], []])
    sides = [data.Sentences(tmp_path / side, "uint16") for side in ("a", "b")]
    batch = data.collate(data.ParallelIds(*sides), [0, 1])
    assert batch.source.tolist() == batch.target_out.tolist() == [[data.EOS], [data.EOS]]
    assert batch.target_in.tolist() == [[data.BOS], [data.BOS]]


def test_wide_ids(tmp_path):
    ids = [[70_000, 5], [65_535]]
    assert write_ids(tmp_path / "x", ids, "uint32") == 3 + 2
    sentences = data.Sentences(tmp_path / "x", "uint32")
    assert [s.tolist() for s in sentences] == ids


@pytest.mark.parametrize("max_tokens", [30, 64, 500])
def test_every_pair_once_and_never_too_many_slots(pairs, max_tokens):
    batches = data.TokenBatches(pairs, max_tokens, seed=5, max_length=30).epoch(0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(200))
    for indices in batches:
        batch = data.collate(pairs, indices)
        assert batch.source.numel() <= max_tokens
        assert batch.target_out.numel() <= max_tokens


def test_epochs_are_decided_by_seed_and_number(pairs):
    def epoch(seed, number):
        batches = data.TokenBatches(pairs, 100, seed, max_length=30).epoch(number)
        return [batch.tolist() for batch in batches]

    assert epoch(1, 0) == epoch(1, 0)
    assert epoch(1, 0) != epoch(1, 1)
    assert epoch(1, 0) != epoch(2, 0)


def test_max_length_counts_eos(pairs):
    batches = data.TokenBatches(pairs, 100, seed=1, max_length=20)
    longest = np.maximum(pairs.source_lengths, pairs.target_lengths)
    kept = np.flatnonzero(longest <= 20).tolist()
    assert 20 in longest[kept]
    assert sorted(np.concatenate(batches.epoch(0)).tolist()) == kept
    assert batches.skipped == 200 - len(kept)


def test_batches_that_cannot_be_made(pairs):
    with pytest.raises(ValueError, match="max_tokens=10 is too small for a pair of"):
        data.TokenBatches(pairs, 10, seed=1, max_length=30)
    with pytest.raises(ValueError, match="no pair of at most max_length=0 tokens"):
        data.TokenBatches(pairs, 10, seed=1, max_length=0)


def test_tokenizer_round_trip(folder):
    tokenizer = data.PreparedCorpus(folder).tokenizer
    ids = tokenizer.encode("abc  def\u2028gab ")
    assert data.EOS not in ids and data.BOS not in ids
    assert tokenizer.decode([data.BOS, *ids, data.EOS, data.PAD]) == "abc def gab"
    assert tokenizer.encode(" \r") == []
    assert tokenizer.encode_batch(["ab", "", "c d"]) == [
        tokenizer.encode(text) for text in ("ab", "", "c d")
    ]
    assert "".join(tokenizer.pieces(ids)).replace("▁", " ").strip() == "abc def gab"


def test_models9830_vocabulary_sizes_differ(folder, tmp_path):
    with pytest.raises(data.CorpusError, match=r"says vocab_size 61, but .* has 60 pieces"):
        data.PreparedCorpus(altered(folder, tmp_path, vocab_size=61))


def test_folders_that_contradict_themselves(folder, tmp_path):
    with pytest.raises(data.CorpusError, match="has no manifest.json"):
        data.PreparedCorpus(tmp_path)
    with pytest.raises(data.CorpusError, match="has format 0"):
        data.PreparedCorpus(altered(folder, tmp_path, format=0))
    corpus = data.PreparedCorpus(altered(folder, tmp_path, splits={"train": {"pairs": 201}}))
    with pytest.raises(data.CorpusError, match="holds 200 pairs, the manifest says 201"):
        corpus.split("train")
    with pytest.raises(data.CorpusError, match="'train' or 'val', not 'test'"):
        corpus.split("test")
    with open(tmp_path / "train.src.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(data.CorpusError, match="its index says"):
        corpus.split("train")
    (tmp_path / "train.src.idx.npy").unlink()
    with pytest.raises(data.CorpusError, match="lacks .*train.src.idx.npy"):
        corpus.split("train")
    (tmp_path / "spm.model").unlink()
    with pytest.raises(data.CorpusError, match="no subword model"):
        data.PreparedCorpus(tmp_path)
