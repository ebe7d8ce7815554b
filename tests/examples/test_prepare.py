"""From text to a prepared folder; the "Data" faults that users reported elsewhere."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma

import numpy as np
import pytest

from examples.translation import prepare as prepare_module
from examples.translation.aligned import check_aligned
from examples.translation.corpora import FilePair, open_corpus
from examples.translation.data import CorpusError, PreparedCorpus
from examples.translation.lines import clean, count_lines, iter_lines, read_lines, write_lines
from examples.translation.prepare import main, prepare

ENGLISH = "a dog runs in the grass|two women sit here|the man reads a book|a girl jumps".split("|")
GERMAN = "ein Hund rennt im Gras|zwei Frauen sitzen hier|der Mann liest|ein Mädchen springt".split(
    "|"
)
VOCAB = 60


@pytest.fixture
def folder(tmp_path):
    """A function that writes a corpus folder; `train` etc. are (English, German) lists of lines."""

    def write(**splits):
        path = tmp_path / "text"
        path.mkdir()
        for split in ("train", "val", "test"):
            sides = splits.get(split, (ENGLISH, GERMAN))
            for language, lines in zip(("en", "de"), sides, strict=True):
                content = "".join(f"{line}\n" for line in lines).encode()
                (path / f"{split}.{language}").write_bytes(content)
        return path

    return write


@pytest.fixture
def prepared(folder, tmp_path):
    """A function that writes a corpus folder and prepares it."""

    def run(max_length=256, **splits):
        corpus = open_corpus(f"files:{folder(**splits)}")
        return prepare(corpus, tmp_path / "out", vocab_size=VOCAB, max_length=max_length)

    return run


def decoded(corpus, split="train", side="target"):
    sentences = getattr(corpus.split(split), side)
    return [corpus.tokenizer.decode(ids) for ids in sentences]


def test_manifest_counts_and_hashes(prepared):
    corpus = prepared()
    manifest = json.loads((corpus.path / "manifest.json").read_text("utf-8"))
    assert manifest == corpus.manifest
    assert (manifest["corpus"], manifest["smoke"]) == ("files:text", False)
    assert (manifest["source"], manifest["target"], manifest["vocab_size"]) == ("en", "de", VOCAB)
    train = manifest["splits"]["train"]
    assert (train["lines"], train["pairs"], train["dropped"]) == (4, 4, {})
    pairs = corpus.split("train")
    assert train["source_tokens"] == pairs.source_lengths.sum()
    assert train["target_tokens"] == pairs.target_lengths.sum()
    assert manifest["splits"]["test"]["files"] == ["test.en", "test.de"]
    files = {path.name: path for path in corpus.path.iterdir()} | {
        path.name: path for path in (corpus.path.parent / "text").iterdir()
    }
    for name, digest in (manifest["inputs"] | manifest["outputs"]).items():
        assert hashlib.sha256(files[name].read_bytes()).hexdigest() == digest
    assert set(manifest["outputs"]) == {p.name for p in corpus.path.iterdir()} - {"manifest.json"}
    assert manifest["train_sources_in_test"] == 4


def test_text_survives(prepared):
    corpus = prepared()
    assert decoded(corpus) == GERMAN
    assert decoded(corpus, "val", "source") == ENGLISH
    assert read_lines(corpus.path / "test.tgt") == GERMAN


def test_same_input_same_bytes(folder, tmp_path):
    corpus = open_corpus(f"files:{folder()}")
    first, second = (prepare(corpus, tmp_path / name, vocab_size=VOCAB) for name in "ab")
    assert first.manifest == second.manifest


def test_packed_files(folder, tmp_path):
    text = folder()
    for name, pack in (("train.en", gzip.compress), ("val.de", lzma.compress)):
        suffix = ".gz" if pack is gzip.compress else ".xz"
        (text / f"{name}{suffix}").write_bytes(pack((text / name).read_bytes()))
        (text / name).unlink()
    corpus = prepare(open_corpus(f"files:{text}"), tmp_path / "out", vocab_size=VOCAB)
    assert decoded(corpus, "train", "source") == ENGLISH
    assert decoded(corpus, "val") == GERMAN


def test_sacrebleu24_fairseq3571_a_stray_carriage_return(prepared):
    odd = ["ein Hund\rrennt im Gras", *GERMAN[1:3], "ein Mädchen springt\r"]
    corpus = prepared(train=(ENGLISH, odd), test=(ENGLISH, odd))
    assert decoded(corpus) == GERMAN
    assert corpus.manifest["splits"]["train"]["lines"] == 4
    assert read_lines(corpus.path / "test.tgt") == [*odd[:3], "ein Mädchen springt"]


def test_fairseq3571_unequal_counts_name_the_first_missing_line(folder, capsys, tmp_path):
    text = folder(train=(ENGLISH, GERMAN[:3]))
    arguments = ["--corpus", f"files:{text}", "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert f"{text / 'train.en'} has 4 lines, but {text / 'train.de'} has 3" in error
    assert "train.de lacks line 4, the partner of 'a girl jumps'" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_subword_nmt29_unicode_separators(prepared):
    odd = ["ein\u2028Hund rennt im\u0085Gras", "zwei\u2029Frauen\x0bsitzen\x1dhier", *GERMAN[2:]]
    corpus = prepared(train=(ENGLISH, odd), test=(ENGLISH, odd))
    assert decoded(corpus) == GERMAN
    assert read_lines(corpus.path / "test.tgt") == odd


def test_opennmt_py252_joeynmt183_an_empty_line_in_the_middle(prepared):
    holed = [GERMAN[0], "", *GERMAN[2:]]
    corpus = prepared(train=(ENGLISH, holed), test=(holed, GERMAN))
    assert decoded(corpus, side="source") == [ENGLISH[0], *ENGLISH[2:]]
    assert decoded(corpus) == [GERMAN[0], *GERMAN[2:]]
    assert corpus.manifest["splits"]["train"]["dropped"] == {"empty target": 1}
    assert read_lines(corpus.path / "test.src") == holed
    assert corpus.manifest["splits"]["test"]["empty_sources"] == 1


def test_marian357_a_line_of_one_space_is_empty(prepared):
    corpus = prepared(train=([*ENGLISH[:3], " "], GERMAN))
    assert corpus.manifest["splits"]["train"]["dropped"] == {"empty source": 1}
    assert corpus.tokenizer.encode(" ") == []


def test_fairseq349_an_empty_target_is_dropped_and_counted(prepared):
    train = (["a dog", "", "a book", "", *ENGLISH], ["", "", "", "ein Hund", *GERMAN])
    corpus = prepared(train=train)
    dropped = {"empty target": 2, "empty source and target": 1, "empty source": 1}
    assert corpus.manifest["splits"]["train"]["dropped"] == dropped
    assert len(corpus.split("train")) == 4


def test_fairseq1772_the_limit_counts_eos(folder, tmp_path):
    corpus = open_corpus(f"files:{folder()}")

    def longest(max_length):
        out = prepare(
            corpus, tmp_path / f"out{max_length}", vocab_size=VOCAB, max_length=max_length
        )
        pairs = out.split("train")
        sides = np.maximum(pairs.source_lengths, pairs.target_lengths)
        return sorted(sides.tolist()), out.manifest["splits"]["train"]["dropped"]

    lengths, dropped = longest(256)
    assert dropped == {} and len(lengths) == 4
    exactly = lengths[-1]
    assert longest(exactly) == (lengths, {})
    shorter, dropped = longest(exactly - 1)
    assert shorter == [length for length in lengths if length < exactly]
    assert dropped == {f"more than {exactly - 1} tokens": 4 - len(shorter)}


def test_repeated_pairs_are_dropped_in_training_only(prepared):
    twice = ([*ENGLISH, *ENGLISH, ENGLISH[0]], [*GERMAN, *GERMAN, "ein anderer Hund"])
    corpus = prepared(train=twice, val=twice)
    assert corpus.manifest["splits"]["train"]["dropped"] == {"repeated pair": 4}
    assert len(corpus.split("train")) == 5
    assert len(corpus.split("val")) == 9


def test_whole_or_absent(folder, tmp_path, monkeypatch):
    corpus = open_corpus(f"files:{folder()}")
    out = tmp_path / "out"

    def fail(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_write_manifest", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus, out, vocab_size=VOCAB)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]

    prepare(corpus, out, vocab_size=VOCAB)
    with pytest.raises(CorpusError, match="is there already"):
        prepare(corpus, out, vocab_size=VOCAB + 1)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_write_manifest", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus, out, vocab_size=VOCAB + 1, overwrite=True)
    assert PreparedCorpus(out).vocab_size == VOCAB
    assert prepare(corpus, out, vocab_size=VOCAB + 1, overwrite=True).vocab_size == VOCAB + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text"]


def test_files_by_command_line(folder, tmp_path, capsys):
    text = folder()
    arguments = ["--out", str(tmp_path / "out"), "--vocab-size", str(VOCAB)]
    for split in ("train", "val", "test"):
        arguments += [f"--{split}", str(text / f"{split}.en"), str(text / f"{split}.de")]
    assert main(arguments) == 0
    assert "train: 4 pairs of 4 lines" in capsys.readouterr().out
    assert decoded(PreparedCorpus(tmp_path / "out")) == GERMAN


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "multi31k"], "unknown corpus 'multi31k': choose from multi30k"),
        (["--corpus", "files:nowhere"], "files:nowhere: there is no such folder"),
        (["--corpus", "files:{text}", "--target", "fr"], "has train.en, but not train.fr"),
        (["--corpus", "files:{text}", "--target", "en"], "source and target are both 'en'"),
        (["--corpus", "files:{text}", "--source", "it", "--target", "fr"], "has no train files"),
        (["--corpus", "files:{text}", "--vocab-size", "9000"], "Vocabulary size too high (9000)"),
        (["--corpus", "files:{text}", "--vocab-size", "9"], "Vocabulary size is smaller than"),
        (["--corpus", "files:{text}", "--max-length", "1"], "max_length must be at least 2"),
        (["--corpus", "files:{text}", "--max-length", "2", "--vocab-size", "60"], "no train pair"),
        (["--corpus", "wmt14-ende", "--target", "fr"], "between en and de, not en to fr"),
        (["--corpus", "iwslt14", "--target", "fr"], "between de and en, not en to fr"),
        (["--corpus", "multi30k", "--target", "it"], "multi30k has no 'it'"),
        (["--corpus", "catalogs", "--target", "it"], "between en and de or fr, not en to it"),
        (["--train", "x.en", "x.de"], "give --corpus, or all of --train, --val and --test"),
        (["--train", "x", "y", "--val", "x", "y", "--test", "x", "y"], "no such file: x"),
        (["--corpus", "catalogs", "--train", "x", "y"], "not both"),
    ],
)
def test_bad_input_costs_one_sentence(folder, tmp_path, capsys, arguments, message):
    text = folder()
    arguments = [argument.format(text=text) for argument in arguments]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("prepare: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_unknown_arguments_cost_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--out", "x", "--vocabulary", "9"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "prepare: unrecognized arguments: --vocabulary 9 (see --help)\n"
    )


def test_text_that_is_not_utf8(folder, tmp_path, capsys):
    text = folder()
    (text / "train.de").write_bytes("ein\nMädchen\nund\nHund\n".encode("latin-1"))
    assert main(["--corpus", f"files:{text}", "--out", str(tmp_path / "out")]) == 2
    assert "train.de is not UTF-8 in line 2" in capsys.readouterr().err


def test_lines_end_at_newline_only(tmp_path):
    path = tmp_path / "x"
    path.write_bytes("\ufeffa\rb\n\u2028\n\n\x0cc\x85\u0085".encode())
    assert list(iter_lines(path)) == ["a\rb", "\u2028", "", "\x0cc\x85\u0085"]
    assert count_lines(path) == 4
    write_lines(path, ["a\rb", "\u2028"])
    assert path.read_bytes() == "a\rb\n\u2028\n".encode()
    with pytest.raises(ValueError, match="holds a line end"):
        write_lines(path, ["a\nb"])
    path.write_bytes(b"")
    assert read_lines(path) == []
    check_aligned(FilePair(path, path))


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (" a \t b\u00a0c ", "a b c"),
        ("a\u2028b\u0085c\rd\x00e", "a b c d e"),
        ("Stra\u00adße\u200b \ufeffx", "Straße x"),
        ("Ma\u0308dchen", "Mädchen"),
        ("„so“ … ½ – it’s", "„so“ … ½ – it’s"),
    ],
)
def test_clean(text, cleaned):
    assert clean(text) == cleaned
