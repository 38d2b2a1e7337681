"""The file of answers that replaces the policy of `asyncrl try`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.commands.trial.answers import read_answers
from asyncrl.errors import DataError


def test_a_line_of_answers_ends_only_at_a_line_break(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answer = json.dumps("a\u2028b\x85c", ensure_ascii=False)
    path.write_bytes(f"{answer}\r\n\n{{\n".encode())
    with pytest.raises(DataError, match="line 3 is not JSON"):
        read_answers(path)
    path.write_bytes(path.read_bytes()[:-2])
    assert read_answers(path) == ["a\u2028b\x85c"]
