"""The page of the configuration is what the schemas say, and all pages name keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.compat.verl.configuration.table import BY_KEY
from asyncrl.config.docs import page
from asyncrl.config.keys import OPTIONS, SECTIONS, option_of
from asyncrl.config.option import summary

ROOT = Path(__file__).parents[2]


def test_the_page_is_current_and_every_key_has_a_meaning() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == page(), "run `make docs`"
    assert "| `learner.lr` |" in page()


def test_the_summary_of_a_section_is_whole_if_its_docstring_has_several_lines() -> None:
    class Section:
        """Adapters: small matrices. Only adapters are
        trained.

        More about them.
        """

    assert summary(Section) == "Adapters: small matrices. Only adapters are trained."
    assert "the step scores of the function scoring.steps.\n" in page()


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")], ids=lambda path: path.name
)
def test_a_page_names_only_keys_that_exist(path: Path) -> None:
    tops = "|".join({key.partition(".")[0] for key in OPTIONS})
    named = re.findall(rf"(?<![\w./\"])((?:{tops})(?:\.[a-z_]+)+)(?![\w(/\[])", path.read_text())
    files = (".py", ".md", ".json", ".jsonl", ".yaml", ".log")
    ours = {key for key in named if option_of(key) or key in SECTIONS or key.endswith(files)}
    theirs = {key for key in named if path.name == "verl.md" and _is_verls(key)}
    assert set(named) - ours - theirs == set()


def _is_verls(key: str) -> bool:
    """Return whether verl has this key or section. Sections at the beginning of its name may be left out."""
    return any(f".{key}." in f".{there}." for there in BY_KEY)
