"""The page has the table."""

from __future__ import annotations

from pathlib import Path

from asyncrl.compat.verl.configuration.page import page
from asyncrl.compat.verl.configuration.table import TABLE

PAGE = Path(__file__).parents[4] / "docs" / "verl.md"


def test_the_page_has_the_table_as_it_is() -> None:
    text = PAGE.read_text()
    assert "`algorithm.adv_estimator`" in text
    assert page(text) == text, "run `make docs`"


def test_the_readme_counts_the_keys_with_a_counterpart() -> None:
    count = sum(len(row.there) for row in TABLE if row.here and not row.alias_of)
    assert f"{count} keys of verl 0.9.1 have a counterpart" in (PAGE.parents[1] / "README.md").read_text()
