"""Scores, and text that must not be scored."""

from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path

import pytest

from examples.translation import score as score_module
from examples.translation.score import ScoreError, main, score

REFERENCE = [
    "Ein Hund läuft durch das hohe Gras.",
    "Zwei Frauen sitzen auf einer Bank, und ein Kind spielt.",
    "Der Mann im blauen Hemd steht auf einer Leiter.",
    "Ein Mädchen springt ins Wasser.",
]
HYPOTHESIS = [
    "Ein Hund rennt durch das hohe Gras.",
    "Zwei Frauen sitzen auf einer Bank und ein Kind spielt.",
    "Ein Mann im blauen Hemd steht auf einer Leiter.",
    "Ein Mädchen springt in das Wasser.",
]


@pytest.fixture
def files(tmp_path):
    """Writes texts under their names; returns the paths as strings."""

    def write(**texts):
        paths = []
        for name, lines in texts.items():
            path = tmp_path / name.replace("_", ".")
            path.write_bytes("".join(f"{line}\n" for line in lines).encode())
            paths.append(str(path))
        return paths

    return write


def test_json_has_every_score_with_its_signature(files, capsys):
    hyp, ref = files(hyp_de=HYPOTHESIS, ref_de=REFERENCE)
    assert main(["--hyp", hyp, "--ref", ref, "--lang", "de", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == score(HYPOTHESIS, [REFERENCE], "de")
    signatures = printed["signatures"]
    assert set(signatures) == {"sacrebleu_13a", "sacrebleu_intl", "chrf"}
    assert "nrefs:1|case:mixed|" in signatures["sacrebleu_13a"]
    assert "tok:13a|smooth:exp|" in signatures["sacrebleu_13a"]
    assert "tok:intl|" in signatures["sacrebleu_intl"]
    assert 40 < printed["sacrebleu_13a"] < 90
    assert printed["sentences"] == 4


def test_perfect_and_hopeless():
    perfect = score(REFERENCE, [REFERENCE], "de")
    assert (perfect["sacrebleu_13a"], perfect["sacrebleu_intl"], perfect["chrf"]) == (100,) * 3
    assert perfect["length_ratio"] == 1
    assert score(["x"] * 4, [REFERENCE], "de")["sacrebleu_13a"] < 1


def test_a_second_reference_can_only_help():
    alone = score(HYPOTHESIS, [REFERENCE], "de")
    both = score(HYPOTHESIS, [REFERENCE, HYPOTHESIS], "de")
    assert alone["sacrebleu_13a"] < both["sacrebleu_13a"] == 100
    assert "nrefs:2" in both["signatures"]["sacrebleu_13a"]


def test_table_for_people(files, capsys):
    hyp, ref = files(hyp_de=HYPOTHESIS, ref_de=REFERENCE)
    assert main(["--hyp", hyp, "--ref", ref, "--lang", "de"]) == 0
    out = capsys.readouterr().out
    scores = score(HYPOTHESIS, [REFERENCE], "de")
    assert f"BLEU 13a   {scores['sacrebleu_13a']:6.2f}   nrefs:1" in out
    assert "chrF2" not in out and "nc:6" in out


def test_unequal_counts_name_both_files(files, capsys):
    hyp, ref = files(hyp_de=HYPOTHESIS[:3], ref_de=REFERENCE)
    assert main(["--hyp", hyp, "--ref", ref, "--lang", "de"]) == 2
    error = capsys.readouterr().err
    assert error == f"score: {hyp} has 3 lines, but {ref} has 4\n"


def test_subword_nmt29_odd_separators_keep_the_count(files, capsys):
    odd = ["Ein\u2028Hund.", "Zwei\u0085Hunde.", "Drei\rHunde.", "Vier Hunde."]
    hyp, ref = files(hyp_de=odd, ref_de=odd)
    assert main(["--hyp", hyp, "--ref", ref, "--lang", "de", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sentences"] == 4


def test_deeplearningexamples87_references_nested_by_sentence():
    with pytest.raises(ScoreError, match="nested by sentence"):
        score(HYPOTHESIS, [[line] for line in REFERENCE], "de")
    with pytest.raises(ScoreError, match="list of lists"):
        score(HYPOTHESIS, REFERENCE, "de")
    with pytest.raises(ScoreError, match="4 hypotheses, but reference 2 has 3 lines"):
        score(HYPOTHESIS, [REFERENCE, REFERENCE[:3]], "de")
    with pytest.raises(ScoreError, match="no hypotheses"):
        score([], [[]], "de")


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda line: line.replace(".", " ."), "a space before a comma or full stop in 4 of 4"),
        (lambda line: line.replace("Ein", "&quot;Ein&quot;"), "escapes such as &quot;"),
        (lambda line: line.replace("Hund", "Hu@@ nd"), "subword marks"),
        (lambda line: "▁" + line.replace(" ", " ▁"), "subword marks"),
    ],
)
def test_sacrebleu162_tokenised_text_is_refused(spoil, found):
    spoilt = [spoil(line) for line in REFERENCE]
    with pytest.raises(ScoreError, match=f"the hypotheses look tokenised: {found}"):
        score(spoilt, [REFERENCE], "de")
    with pytest.raises(ScoreError, match=f"reference 1 look tokenised: {found}"):
        score(REFERENCE, [spoilt], "de")
    forced = score(spoilt, [REFERENCE], "de", force=True)
    assert any("look tokenised" in warning for warning in forced["warnings"])


def test_one_odd_line_in_twenty_is_not_tokenised():
    lines = [*REFERENCE * 5]
    lines[3] = "Er sagte nichts ."
    assert score_module.why_tokenised(lines) is None
    assert score_module.why_tokenised(["Quoi ? Non ! Oui : voilà ; bien."] * 20) is None


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("ref.de.sgm", "Text"),
        ("ref.de.xml", "Text"),
        ("ref.de", '<refset setid="newstest2014" srclang="any" trglang="de">'),
        ("ref.de", '<?xml version="1.0" encoding="UTF-8"?>'),
    ],
)
def test_tensor2tensor1542_sgm_is_refused(tmp_path, capsys, name, first):
    (tmp_path / name).write_text(f"{first}\n")
    (tmp_path / "hyp").write_text("Text\n")
    arguments = ["--hyp", str(tmp_path / "hyp"), "--ref", str(tmp_path / name), "--lang", "de"]
    assert main(arguments) == 2
    assert f"{name} is SGML or XML" in capsys.readouterr().err


def test_tensor2tensor129_length_ratio_warns(files, capsys):
    longer = [f"{line} Und noch mehr." for line in REFERENCE]
    hyp, ref = files(hyp_de=longer, ref_de=REFERENCE)
    assert main(["--hyp", hyp, "--ref", ref, "--lang", "de", "--json"]) == 0
    out, err = capsys.readouterr()
    scores = json.loads(out)
    assert scores["length_ratio"] > 1.1
    assert f"length ratio {scores['length_ratio']:.3f} is outside 0.9 to 1.1" in err
    assert score(HYPOTHESIS, [REFERENCE], "de")["warnings"] == []


def test_languages_without_spaces_warn():
    assert "trust chrF" in score(["我们走吧"], [["我们走"]], "zh", force=True)["warnings"][0]


def test_bad_arguments_cost_one_line(files, capsys):
    (hyp,) = files(hyp_de=HYPOTHESIS)
    with pytest.raises(SystemExit) as stop:
        main(["--hyp", hyp, "--lang", "de"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["--hyp", hyp, "--ref", "nowhere.de", "--lang", "de"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def wmt17():
    data = os.environ.get("FASTATTN_TEST_DATA")
    if not data:
        pytest.skip("FASTATTN_TEST_DATA is not set")
    return Path(data) / "wmt17-systems"


@pytest.mark.parametrize("system", ["LIUM-NMT.4900", "KIT.4950"])
def test_scores_that_sacrebleu_published(wmt17, system):
    def lines(name):
        return gzip.decompress((wmt17 / name).read_bytes()).decode().split("\n")[:-1]

    stem = f"newstest2017.{system}.en-de"
    scores = score(lines(f"{stem}.txt.gz"), [lines("reference.de.gz")], "de")
    with open(wmt17 / "sacrebleu_expected.tsv", newline="") as file:
        expected = {row["system"]: row for row in csv.DictReader(file, delimiter="\t")}[stem]
    assert round(scores["sacrebleu_13a"], 2) == float(expected["bleu_mteval13a_expected"])
    if (published := expected["bleu_mteval14_intl_expected"]) != "None":
        assert round(scores["sacrebleu_intl"], 2) == float(published)
    measured = float(expected["bleu_intl_measured"])
    assert scores["sacrebleu_intl"] == pytest.approx(measured, abs=1e-4)
