"""The benchmarks' report: what README.md and docs/benchmarks.md show is in the result files."""

from __future__ import annotations

import pytest

from benchmarks import report
from benchmarks.harness import compare

ROW = {
    "name": "op forward: 4x4",
    "peer": "torch op",
    "buffers": "reused",
    "ours_ms": 2.0,
    "peer_ms": 3.0,
    "ratio": 1.5,
    "wall_ratio": 1.4,
    "reach": 1.4,
    "limit": {"exp": 0.25, "matmul": 0.75},
    "limit_fraction": 0.8,
}


def test_the_readme_shows_the_result_files():
    text = report.README.read_text("utf-8")
    assert report.with_block(text, report.summary(report.load_results())) == text


def test_the_page_shows_the_result_files():
    text = report.DOCS.read_text("utf-8")
    assert report.with_block(text, report.sections(report.load_results())) == text


def test_every_result_file_has_its_chart():
    assert {path.stem for path in report.PLOTS.glob("*.png")} == {*report.load_results()}


def test_a_text_without_the_block_is_refused():
    with pytest.raises(ValueError, match="no block"):
        report.with_block("nothing measured here", "table")


def test_a_row():
    line = report.markdown_table([ROW]).splitlines()[-1]
    assert line == (
        "| op forward: 4x4 | torch op | reused | 3.000 | 2.000 | 1.50 | 1.40 | 1.40 "
        "| 80% of matmul 75% + exp 25% |"
    )


def test_a_row_that_torch_wins():
    line = report.markdown_table([{**ROW, "wall_ratio": 0.9}]).splitlines()[-1]
    assert "| 1.50 | **0.90** | 1.40, missed |" in line


def test_the_summary_counts_goals_reached_both_ways():
    rows = [ROW, {**ROW, "ratio": 1.3}, {**ROW, "wall_ratio": 1.2}, {**ROW, "reach": None}]
    line = report.summary_table(rows).splitlines()[-1]
    assert line == "| op forward | 4 | 1.30 | 1.50 | 1.50 | 1.40 | 1 of 3 |"


def test_a_chart_is_drawn(tmp_path):
    machine = {"threads": 2, "cpu": "a", "isa": "b", "torch": "c", "date": "2020-01-01T00:00"}
    path = tmp_path / "chart.png"
    report.draw_chart({"machine": machine, "rows": [ROW, {**ROW, "reach": None}]}, path)
    assert path.stat().st_size > 1000


def test_an_unknown_file_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as exit:
        report.main(["nowhere.json"])
    assert exit.value.code == 2
    assert capsys.readouterr().err.endswith("error: there is no file nowhere.json\n")


def test_both_sides_take_turns_at_being_first():
    calls = []
    found = compare(lambda: calls.append("o"), lambda: calls.append("p"), seconds=0.0)
    assert "".join(calls).startswith("op" + "oppo" + "oppooppooppoop")
    assert found.ours.rounds == 7
    assert found.cpu_ratio > 0
