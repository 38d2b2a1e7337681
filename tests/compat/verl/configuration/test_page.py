"""The page has the table."""

from __future__ import annotations

from pathlib import Path

from asyncrl.compat.verl.configuration.page import page

PAGE = Path(__file__).parents[4] / "docs" / "verl.md"


def test_the_page_has_the_table_as_it_is() -> None:
    text = PAGE.read_text()
    assert "`algorithm.adv_estimator`" in text
    assert page(text) == text, "run `make docs`"
