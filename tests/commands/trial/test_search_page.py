"""The commands of docs/tools.md, as written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.commands.trial.test_try import run

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "tools.md").read_text().partition("\n## Search passages")[2].partition("\n## ")[0]


def test_an_episode_over_the_shipped_corpus_is_played_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"^asyncrl try (.*)$", PAGE, re.MULTILINE)
    status, shown, errors = run(monkeypatch, capsys, *shlex.split(command), f"actor.search.indexes={tmp_path}")
    assert status == 0, errors
    parts = [
        r"Who discovered the planet after which uranium is named\?",
        r"→ search\(\{\"query\": \"uranium element named after planet\"\}\)",
        r"Doc 1\(Title: Uranium\)",
        r"Doc 1\(Title: Uranus\) William Herschel discovered Uranus",
        r"rules +f1 1, f1/exact 1",
    ]
    assert re.search(".*".join(parts), shown, re.DOTALL), shown
    for line in re.findall(r"^Doc .*$", PAGE, re.MULTILINE):
        assert line.partition(" ")[2].partition("(")[2] in shown.replace("\n", " ").replace("  ", " ")
