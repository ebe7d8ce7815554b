"""The whole job on text small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from examples.translation import run as run_module
from examples.translation.config import ModelConfig
from examples.translation.corpora import FilePair, RawCorpus
from examples.translation.data import CorpusError, PreparedCorpus
from examples.translation.model import parameter_count
from examples.translation.run import StepError, main, step

CONFIG = """
[model]
layers = 1
d_model = 16
d_ff = 32
heads = 2
dropout = 0.0
[training]
tokens_per_update = 300
max_tokens = 400
max_length = 64
max_steps = 4
warmup_steps = 10
checkpoint_steps = 2
keep_checkpoints = 2
validate_steps = 4
log_steps = 2
"""


@pytest.fixture
def text(tmp_path):
    """A folder of train, val and test files: sentences of letters, and the same backwards."""
    folder = tmp_path / "letters"
    folder.mkdir()
    random = np.random.default_rng(1)
    for split, count in (("train", 200), ("val", 20), ("test", 12)):
        lines = [list(random.choice(list("abcdefgh"), 7)) for _ in range(count)]
        if split == "test":
            lines[5] = [" "]
        for language, order in (("en", 1), ("de", -1)):
            content = "".join(" ".join(line[::order]) + ".\n" for line in lines)
            (folder / f"{split}.{language}").write_text(content.replace(" .\n", " \n"))
    return folder


@pytest.fixture
def job(tmp_path, text, monkeypatch):
    """Runs `main` in an empty folder with a small config; further arguments may be given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(CONFIG)
    common = ["--config", "small.toml", "--vocab-size", "20", "--device", "cpu"]
    return lambda *arguments: main([*common, *arguments])


def result_of(name):
    return json.loads(Path("runs", name, "result.json").read_text("utf-8"))


def test_from_text_to_result(job, text, capsys):
    assert job("--data", str(text), "--run", "first") == 0
    out = capsys.readouterr().out
    folder, result = Path("runs/first"), result_of("first")

    assert {"sacrebleu_13a", "signature", "parameters", "train_seconds"} <= set(result)
    assert {"target_tokens_per_second", "corpus", "commit"} <= set(result)
    assert result["corpus"] == "files:letters"
    assert result["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|")
    assert result["scores"]["sentences"] == 12
    assert result["test_files"] == ["test.en", "test.de"]
    assert result["steps"] == 4 and result["train_seconds"] > 0
    assert result["machine"]["torch"] and result["max_minutes"] == 10
    config = ModelConfig(vocab_size=20, layers=1, d_model=16, d_ff=32, heads=2)
    assert result["parameters"] == parameter_count(config)
    assert set(result["seconds"]) == {"prepare", "train", "translate", "score", "picture", "total"}

    translations = (folder / "test.hyp").read_bytes().split(b"\n")
    assert len(translations) == 13 and translations[5] == b""
    assert (folder / "attention.png").stat().st_size > 1000
    assert PreparedCorpus(folder / "data").manifest["splits"]["test"]["empty_sources"] == 1

    first_source = (text / "test.en").read_text().split("\n")[0]
    assert f"source       {first_source}" in out
    assert f"BLEU {result['sacrebleu_13a']:.2f} (nrefs:1|" in out
    assert "attention picture: runs/first/attention.png" in out
    for name in ("train", "translate", "attention_picture"):
        assert f"$ python -m examples.translation.{name} " in out


def test_a_model_that_says_nothing_is_scored_and_drawn(job, text, monkeypatch):
    def silent(arguments):
        output = arguments[arguments.index("--output") + 1]
        Path(output).write_text("\n" * 12)
        return 0

    monkeypatch.setattr(run_module.translate, "main", silent)
    assert job("--data", str(text), "--run", "r") == 0
    result = result_of("r")
    assert result["sacrebleu_13a"] == 0 and "length ratio" in result["scores"]["warnings"][0]
    assert Path("runs/r/attention.png").is_file()


def test_a_picture_that_fails_leaves_the_result(job, text, monkeypatch, capsys):
    monkeypatch.setattr(run_module.attention_picture, "main", lambda arguments: 2)
    assert job("--data", str(text), "--run", "r") == 2
    assert "run: attention_picture failed" in capsys.readouterr().err
    assert result_of("r")["signature"]


def test_finished_runs_are_not_overwritten_without_a_name(job, text):
    assert job("--data", str(text)) == 0
    assert job("--data", str(text)) == 0
    assert {path.name for path in Path("runs").iterdir()} == {"small", "small-2"}


def test_a_named_run_goes_on_with_its_corpus(job, text, capsys):
    assert job("--data", str(text), "--run", "r") == 0
    before = result_of("r")
    assert job("--run", "r", "--set", "max_steps=6") == 0
    assert "files:letters, with which this run was begun" in capsys.readouterr().out
    after = result_of("r")
    assert (before["steps"], after["steps"]) == (4, 6)
    assert after["overrides"] == ["max_steps=6"]

    assert job("--run", "r", "--corpus", f"files:{text}") == 0
    assert job("--run", "r", "--corpus", "multi30k") == 2
    assert "prepared with corpus 'files:letters', not 'multi30k'" in capsys.readouterr().err
    assert job("--run", "r", "--data", str(text), "--target", "fr") == 2
    assert "prepared with target 'de', not 'fr'" in capsys.readouterr().err


def test_a_prepared_folder_is_taken_as_it_is(job, text):
    assert job("--data", str(text), "--run", "r") == 0
    assert job("--data", "runs/r/data", "--run", "s") == 0
    assert not Path("runs/s/data").exists()
    assert result_of("s")["corpus"] == "files:letters"


def test_a_smoke_corpus_is_called_one(job, text, monkeypatch, capsys):
    def load(name, source, target):
        if name == "multi30k":
            raise CorpusError("broke off")
        files = ([FilePair(text / f"{s}.en", text / f"{s}.de")] for s in ("train", "val", "test"))
        return RawCorpus(name, source, target, *files, smoke=True, notes=("smoke note",))

    monkeypatch.setattr(run_module, "default_corpus", lambda *a: ("multi30k", "its home answers"))
    monkeypatch.setattr(run_module, "open_corpus", load)
    assert job("--run", "r") == 0
    out = capsys.readouterr().out
    assert "corpus: multi30k, because its home answers" in out
    assert "corpus: catalogs, because multi30k answered but failed: broke off" in out
    assert "catalogs (smoke corpus): en to de" in out and "note: smoke note" in out
    assert "This is a smoke corpus: the score compares with nothing published." in out
    assert result_of("r")["corpus"] == "catalogs (smoke corpus)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "huge"], "run: no config file huge"),
        (["--set", "model.depth=3"], "unknown key 'depth'"),
        (["--max-minutes", "0"], "run: --max-minutes must be positive, not 0"),
        (["--data", "nowhere"], "run: files:nowhere: there is no such folder"),
        (["--corpus", "multi31k"], "run: unknown corpus 'multi31k'"),
        (["--data", "{text}", "--target", "fr"], "has train.en, but not train.fr beside it"),
        (["--data", "{text}", "--vocab-size", "9999"], "Vocabulary size too high (9999)"),
    ],
)
def test_bad_input_costs_one_sentence(job, text, capsys, arguments, message):
    assert job(*(argument.format(text=text) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(Path("runs").glob("*/data"))


def test_unknown_arguments_are_errors(job, capsys):
    with pytest.raises(SystemExit) as stop:
        job("--minutes", "5")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "run: unrecognized arguments: --minutes 5 (see --help)\n"


def test_a_step_that_fails_stops_the_job(job, text, capsys):
    assert job("--data", str(text), "--set", "max_tokens=5", "--run", "r") == 2
    error = capsys.readouterr().err
    assert "train: max_tokens=5 is too small" in error
    assert error.endswith("run: train failed; what is done is kept, the same command goes on\n")
    assert not Path("runs/r/result.json").exists()


def test_steps_that_are_stopped_or_exit(capsys):
    with pytest.raises(StepError, match="train was stopped") as stopped:
        step("train", lambda arguments: 130, ["--run", "a b"])
    assert stopped.value.status == 130
    assert capsys.readouterr().out == "\n$ python -m examples.translation.train --run 'a b'\n"

    def exits(arguments):
        raise SystemExit(2)

    with pytest.raises(StepError, match="score failed"):
        step("score", exits, [])
