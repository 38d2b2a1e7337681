"""The output of `asyncrl evaluate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.commands.evaluate import __main__ as command
from asyncrl.commands.evaluate.results import EvaluatedSource, EvaluationResult


def test_names_are_whole_if_the_output_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 0.5)
    source = EvaluatedSource(1, 64, 0, 0.5, 0.5, 0.5, 0.5, 1234.5, at, at, at, dict.fromkeys(at, 1))
    name = "a_publisher_with_a_long_name/and_a_data_set_with_a_longer_one"
    result = EvaluationResult(64, 1.0, source, {name: source}, {})
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(command, "requested", lambda *_: None)
    monkeypatch.setattr(command, "evaluate", lambda *_: (Path("runs/x"), result))
    monkeypatch.setattr(command, "samples", lambda *_: [])
    assert command.main(["model", "--data", "tasks.parquet"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert [name, "1", "64", "0", "0.500", "0.500", "0.500", "0.500", "1234.5"] in rows
    assert [name, "maj@k", *["0.500"] * 7] in rows
    assert "the outcome of the most frequent answer among k" in printed
