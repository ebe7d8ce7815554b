"""What the README and the other texts say is so: their programs run, their names exist."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastattn import _native
from fastattn._dispatch import registered_backends, registered_ops
from fastattn._status import collect

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)


def table_rows(text):
    """The cells of every table row that has code in its first cells, header rows left out."""
    lines = (line.strip() for line in text.splitlines())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return [row for row in rows if not set(row[0]) <= set("-: ")]


def test_the_readme_shows_programs():
    assert len(PROGRAMS) >= 3


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_the_readme_s_programs_run_as_printed(program):
    subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, check=True, timeout=120
    )


def test_the_pictures_of_masks_are_what_the_programs_print():
    text = (ROOT / "docs" / "masks.md").read_text()
    pairs = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", text, re.M | re.S)
    assert len(pairs) == text.count("```python") == text.count("```text") >= 6
    names = {}
    for program, expected in pairs:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(program, names)
        assert printed.getvalue() == expected, program


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_make_targets_exist(path):
    text = path.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    used = re.findall(r"(?:^|`|\]= )make ([a-z-]+)", text, re.M)
    assert set(used) <= targets


@pytest.mark.skipif(not _native.available(), reason="the table is of a machine with CPU kernels")
def test_the_table_of_what_runs_where_is_true():
    shown = {row[0].strip("`"): row[2:] for row in table_rows(README) if len(row) == 5}
    shown.pop("op")
    assert set(shown) == set(registered_ops())
    status = collect()["ops"]
    for op, cells in shown.items():
        first = status[op]["cpu"][0]
        true = [
            first["reason"] is None,
            *(name in registered_backends(op) for name in ("torch", "reference")),
        ]
        assert cells == ["yes" if value else "no" for value in true], op


def test_the_map_from_the_paper_to_the_code_is_true():
    rows = [row for row in table_rows((ROOT / "docs" / "paper.md").read_text()) if len(row) == 3]
    places = [(row[1].strip("`"), row[2].strip("`")) for row in rows if row[1].endswith(".py`")]
    assert len(places) > 20
    for file, name in places:
        source = (ROOT / file).read_text()
        assert re.search(rf"^(class|def) {name}\b", source, re.M), (file, name)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "adr").glob("*.md")), ids=lambda p: p.stem)
def test_a_decision_says_what_why_cost_and_how_to_undo_it(path):
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    assert headings[0].startswith(f"{path.stem[:4]} ")
    assert headings[1:] == ["What", "Why", "Cost", "How to undo it"]
    assert len(path.read_text().splitlines()) <= 70


def test_measured_tables_are_those_that_programs_wrote():
    text = (ROOT / "docs" / "adr" / "0003-registration.md").read_text()
    written = (ROOT / "benchmarks" / "results" / "registration.txt").read_text()
    assert f"```\n{written}```" in text
