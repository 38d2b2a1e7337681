"""The page of the configuration is what the schemas say."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.docs import page

ROOT = Path(__file__).parents[2]


def test_the_page_is_current_and_every_key_has_a_meaning() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == page(), "run `make docs`"
    assert "| `learner.lr` |" in page()
