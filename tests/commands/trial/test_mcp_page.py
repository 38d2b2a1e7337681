"""The example in docs/tools.md, run as written."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.commands.trial.test_try import run

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text().partition("\n## Tools of MCP servers")[2]


def test_the_example_on_the_page_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (server,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    experiment = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
    tasks, answers = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[:2]
    (command,) = re.findall(r"```sh\nasyncrl try (.*?)\n```", PAGE, re.DOTALL)
    files = {"notes.py": server, "mine.yaml": experiment, "tasks.jsonl": tasks, "answers.jsonl": answers}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    status, shown, errors = run(monkeypatch, capsys, *shlex.split(command))
    assert status == 0, errors
    parts = [
        r"tools +write_note, read_notes\n",
        r"tool write_note ─+\nThere are 1 notes.\n",
        r"tool read_notes ─+\nmilk is out\n",
        r"outcome +1\n",
    ]
    assert re.search(".*".join(parts), shown, re.DOTALL), shown
