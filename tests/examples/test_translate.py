"""The command and the function: one line out for each line in, whatever it holds."""

from __future__ import annotations

import io
import random
import shutil
from types import SimpleNamespace

import pytest

from examples.translation import translate as module
from examples.translation.checkpoint import CheckpointError
from examples.translation.translate import Translator, main

LIMIT = 16  # max_length of the toy run: 15 letters and EOS


@pytest.fixture(scope="module")
def translator(toy_run):
    return Translator.load(toy_run)


def translated(run, tmp_path, content, *options):
    """What the command writes for the bytes `content`."""
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(content)
    arguments = ["--run", run, "--input", source, "--output", target, "--device", "cpu", *options]
    assert main([str(a) for a in arguments]) == 0
    return target.read_bytes()


def test_the_toy_model_turns_sentences_around(translator):
    lines = ["a b c", "d e f g", "j a j b", "c h", "i g e c a"]
    results = translator.translate(lines)
    expected = [" ".join(line.split()[::-1]) for line in lines]
    assert sum(map(str.__eq__, results, expected)) >= 4, results


def test_order_and_duplicates_are_kept(translator):
    lines = ["a b c", "d e f g h", "a b c", "j"]
    results = translator.translate(lines)
    assert len(results) == 4 and results[0] == results[2]
    assert results == [translator.translate([line])[0] for line in lines]


@pytest.mark.parametrize(
    "content",
    [b"", b"a b\n", b"a b", b"a b\nc d", b"a b\n\nc d\n", b"\n\n\n", b"\n a\n \t \nb\n"],
)
def test_one_line_out_for_each_line_in(toy_run, tmp_path, content):
    out = translated(toy_run, tmp_path, content)
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    assert out.count(b"\n") == len(lines)
    assert out == b"" or out.endswith(b"\n")


def test_opennmt_py_252_joeynmt_183_an_empty_line_stays_empty(toy_run, tmp_path):
    out = translated(toy_run, tmp_path, b"a b c\n\nd e f\n").split(b"\n")
    assert out[1] == b"" and out[3:] == [b""]
    assert out[0] == translated(toy_run, tmp_path, b"a b c\n").strip(b"\n")
    assert out[2] == translated(toy_run, tmp_path, b"d e f\n").strip(b"\n")


@pytest.mark.parametrize("line", ["", " ", "   \t ", "\u3000\u2003", "\u200b", "\r", "\x0b\x0c"])
def test_marian_357_a_line_without_text_does_not_ask_the_model(translator, monkeypatch, line):
    def refuse(*_):
        raise AssertionError("the model was asked")

    monkeypatch.setattr(module, "beam_search", refuse)
    assert translator.translate([line, line]) == ["", ""]


@pytest.mark.parametrize(
    "inside", ["\r", "\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x00"]
)
def test_sacrebleu_24_subword_nmt_29_only_newline_ends_a_line(toy_run, tmp_path, inside):
    text = f"a b{inside}c d\ne f\n".encode()
    out = translated(toy_run, tmp_path, text).split(b"\n")
    assert len(out) == 3 and out[0] and out[1]
    if inside != "\x00":
        plain = translated(toy_run, tmp_path, b"a b c d\ne f\n").split(b"\n")
        assert out == plain


def test_fairseq_591_3975_a_line_too_long_is_cut_with_a_warning(toy_run, tmp_path, capsys):
    long = b" ".join([b"a", b"b"] * 20)
    out = translated(toy_run, tmp_path, b"c d\n" + long + b"\ne f\n").split(b"\n")
    assert len(out) == 4 and out[1]
    warnings = capsys.readouterr().err
    assert warnings.count("\n") == 1
    assert f"line 2 has 41 tokens, the model takes {LIMIT}: its end is cut" in warnings
    cut = translated(toy_run, tmp_path, b" ".join([b"a", b"b"] * 7 + [b"a"]) + b"\n")
    assert cut == out[1] + b"\n"


@pytest.mark.parametrize(("letters", "cut"), [(LIMIT - 1, False), (LIMIT, True)])
def test_fairseq_1772_the_limit_counts_eos(toy_run, letters, cut):
    warnings = []
    translator = Translator.load(toy_run)
    translator.warn = warnings.append
    found = translator.search([" ".join("abcdefghijabcdefghij"[:letters])])
    assert len(found) == 1 and len(found[0]) == 1
    assert bool(warnings) == cut


def test_bytes_that_are_not_utf8_cost_a_warning_not_a_line(toy_run, tmp_path, capsys):
    out = translated(toy_run, tmp_path, b"a b\nc \xff\xfe d\ne f\n")
    assert out.count(b"\n") == 3
    assert "line 2 is not UTF-8" in capsys.readouterr().err


def test_any_bytes_give_as_many_lines(toy_run, tmp_path):
    generator = random.Random(4)
    content = bytes(generator.choice(b"ab \n\r\xc2\x85\xe2\x80\xa8\x00\t") for _ in range(600))
    out = translated(toy_run, tmp_path, content + b"\n", "--buffer-lines", "7")
    assert out.count(b"\n") == content.count(b"\n") + 1


@pytest.mark.parametrize("buffer", [1, 2, 100])
def test_the_buffer_changes_nothing_but_the_waiting(toy_run, tmp_path, buffer):
    content = b"a b\nc d e\n\nf g h i\nj\n"
    expected = translated(toy_run, tmp_path, content)
    assert translated(toy_run, tmp_path, content, "--buffer-lines", str(buffer)) == expected
    assert translated(toy_run, tmp_path, content, "--batch-size", str(buffer)) == expected


def test_stdin_to_stdout_line_by_line(toy_run, monkeypatch):
    """Each answer is written and flushed before the next line is read."""
    events = []

    class Out(io.BytesIO):
        def flush(self):
            events.append(("out", self.getvalue().count(b"\n")))

    class In(io.BytesIO):
        def __next__(self):
            line = super().__next__()
            events.append(("in", line))
            return line

    out = Out()
    monkeypatch.setattr(module.sys, "stdin", SimpleNamespace(buffer=In(b"a b\nc d\n")))
    monkeypatch.setattr(module.sys, "stdout", SimpleNamespace(buffer=out))
    assert main(["--run", str(toy_run), "--buffer-lines", "1", "--device", "cpu"]) == 0
    assert events == [("in", b"a b\n"), ("out", 1), ("in", b"c d\n"), ("out", 2)]


def test_n_best_lists(toy_run, tmp_path):
    out = translated(toy_run, tmp_path, b"a b c\n\nd e\n", "--n-best", "3").decode()
    rows = [line.split(" ||| ") for line in out.splitlines()]
    assert [row[0] for row in rows] == ["0"] * 3 + ["2"] * 3
    best = translated(toy_run, tmp_path, b"a b c\n\nd e\n").decode().split("\n")
    assert (rows[0][1], rows[3][1]) == (best[0], best[2])
    assert float(rows[0][2]) >= float(rows[1][2]) >= float(rows[2][2])


def test_the_search_can_be_changed(toy_run, tmp_path, monkeypatch):
    seen = []
    search = module.beam_search

    def recorded(model, source, padding, config, n_best):
        seen.append(config)
        return search(model, source, padding, config, n_best)

    monkeypatch.setattr(module, "beam_search", recorded)
    translated(toy_run, tmp_path, b"a\n")
    options = ["--beam", "2", "--alpha", "1", "--length-penalty", "average"]
    translated(toy_run, tmp_path, b"a\n", *options)
    assert [(c.beam, c.alpha, c.length_penalty) for c in seen] == [
        (4, 0.6, "gnmt"),
        (2, 1.0, "average"),
    ]


def test_the_average_is_used_where_there_is_one(toy_run, tmp_path):
    run = shutil.copytree(toy_run, tmp_path / "run")
    averaged = Translator.load(run).model.embedding.weight
    (run / "averaged.pt").unlink()
    last = Translator.load(run).model.embedding.weight
    chosen = Translator.load(run, run / "checkpoints" / "step-00000300.pt").model.embedding.weight
    assert (last == chosen).all() and not (last == averaged).all()


def _without(name):
    def break_it(run):
        (run / name).unlink()

    return break_it


def _truncated(run):
    (run / "averaged.pt").write_bytes(b"PK")


def _empty(run):
    (run / "averaged.pt").unlink()
    shutil.rmtree(run / "checkpoints")


@pytest.mark.parametrize(
    ("damage", "options", "words"),
    [
        (_without("spm.model"), [], "no subword model"),
        (_truncated, [], "averaged.pt is damaged"),
        (_empty, [], "holds no checkpoint yet"),
        (shutil.rmtree, [], "no run folder"),
        (None, ["--checkpoint", "nowhere.pt"], "no checkpoint at nowhere.pt"),
        (None, ["--input", "nowhere.txt"], "nowhere.txt"),
        (None, ["--output", "no/where.txt"], "no/where.txt"),
        (None, ["--beam", "0"], "beam must be positive"),
        (None, ["--alpha", "-1"], "alpha must be at least 0"),
        (None, ["--n-best", "5"], "--n-best 5 is more than --beam 4"),
        (None, ["--batch-size", "0"], "--batch-size must be at least 1"),
    ],
)
def test_a_mistake_costs_one_sentence(toy_run, tmp_path, capsys, damage, options, words):
    run = shutil.copytree(toy_run, tmp_path / "run")
    if damage:
        damage(run)
    (tmp_path / "in.txt").write_text("a b\n")
    paths = {"--input": tmp_path / "in.txt", "--output": tmp_path / "out.txt", "--run": run}
    arguments = [str(word) for pair in paths.items() for word in pair]
    assert main([*arguments, "--device", "cpu", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error, error


def test_wrong_options_exit_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--length-penalty", "wu", "--run", "x"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_another_vocabulary_is_refused(toy_run, tmp_path):
    from conftest import make_corpus

    run = shutil.copytree(toy_run, tmp_path / "run")
    other = make_corpus(tmp_path / "other", 300, letters="abcdefghijkl")
    shutil.copyfile(other / "spm.model", run / "spm.model")
    with pytest.raises(CheckpointError, match="vocabulary of 25, but .*spm.model has 29"):
        Translator.load(run)
