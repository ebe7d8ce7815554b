"""The measured tables of the READMEs are those of the result files."""

from __future__ import annotations

import pytest

from examples.translation.report import READMES, load_results, table, with_table


def test_there_are_results():
    assert load_results()


@pytest.mark.parametrize("path", READMES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_the_readme_shows_the_result_files(path):
    text = path.read_text("utf-8")
    assert with_table(text, table(load_results())) == text


def test_a_readme_without_the_block_is_refused():
    with pytest.raises(ValueError, match="no block"):
        with_table("nothing measured here", "table")
