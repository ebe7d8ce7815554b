"""A toy corpus, a toy model, and one run that learned to turn sentences around."""

from __future__ import annotations

import json

import numpy as np
import pytest
import sentencepiece

from examples.translation import data
from examples.translation.train import main as train

LETTERS = "abcdefghij"

# Words of two letters written into one: 2 layers learn the task in seconds.
TOY_CONFIG = """
[model]
layers = 2
d_model = 32
d_ff = 64
heads = 2
dropout = 0.0

[training]
tokens_per_update = 600
max_tokens = 700
max_length = 16
max_steps = 300
warmup_steps = 60
lr_factor = 0.3
checkpoint_steps = 20
keep_checkpoints = 3
validate_steps = 100
log_steps = 10
"""


def make_corpus(folder, pairs, seed=0, letters=LETTERS):
    """A prepared folder of sentences of 2 to 6 letters; the target is the source reversed."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    sentences = [
        " ".join(random.choice(list(letters), random.integers(2, 7))) for _ in range(pairs)
    ]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_prefix=str(folder / "spm"),
        vocab_size=4 + 1 + 2 * len(letters),
        model_type="bpe",
        character_coverage=1.0,
        pad_id=data.PAD,
        bos_id=data.BOS,
        eos_id=data.EOS,
        unk_id=data.UNK,
        minloglevel=2,
    )
    tokenizer = data.Tokenizer(folder / "spm.model")
    splits = {}
    for name, part in (("train", sentences), ("val", sentences[:50])):
        source = [tokenizer.encode(text) for text in part]
        _write(folder / f"{name}.src", source)
        _write(folder / f"{name}.tgt", [ids[::-1] for ids in source])
        splits[name] = {"pairs": len(part)}
    manifest = {
        "format": data.FORMAT,
        "vocab_size": tokenizer.vocab_size,
        "id_dtype": "uint16",
        "splits": splits,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def _write(prefix, sentences):
    writer = data.IdWriter(prefix, "uint16")
    for ids in sentences:
        writer.write(ids)
    writer.close()


@pytest.fixture(scope="session")
def toy_corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("toy") / "data", 2000)


@pytest.fixture(scope="session")
def toy_config(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "toy.toml"
    file.write_text(TOY_CONFIG)
    return file


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory, toy_corpus, toy_config):
    """A finished run on the toy corpus."""
    run = tmp_path_factory.mktemp("runs") / "toy"
    arguments = ["--data", str(toy_corpus), "--run", str(run), "--config", str(toy_config)]
    assert train([*arguments, "--no-bar", "--device", "cpu"]) == 0
    return run
