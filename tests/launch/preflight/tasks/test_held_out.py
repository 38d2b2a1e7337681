"""Held-out tasks that are training tasks are counted and warned of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.data.reading import TaskFile
from asyncrl.launch.preflight.tasks.held_out import warn_of_shared_tasks


def file_of(path: Path, *questions: str) -> TaskFile:
    path.write_text("".join(f"{json.dumps({'prompt': each, 'answer': '2'})}\n" for each in questions))
    return TaskFile(path)


def warnings_of(files: list[TaskFile], caplog: pytest.LogCaptureFixture, held_out: str | None = "b") -> list[str]:
    caplog.clear()
    warn_of_shared_tasks(["a"], None if held_out is None else [held_out], files)
    return [record.getMessage() for record in caplog.records]


def test_held_out_tasks_with_the_prompt_of_a_training_task_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = file_of(tmp_path / "a.jsonl", "1+1?", "1+2?", "1+3?")
    [line] = warnings_of([train, file_of(tmp_path / "b.jsonl", "1+3?", "2+2?", "1+1?")], caplog)
    assert line.startswith("data.eval: 2 of 3 held-out tasks have the prompt of a training task, so")
    assert warnings_of([train, file_of(tmp_path / "c.jsonl", "2+2?")], caplog) == []


def test_the_same_sources_are_warned_of_and_need_no_comparison(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [line] = warnings_of([file_of(tmp_path / "a.jsonl", "1+1?")], caplog, held_out="a")
    assert line.startswith("data.eval names the same sources as data.train")


def test_a_run_without_held_out_tasks_is_not_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of([file_of(tmp_path / "a.jsonl", "1+1?")], caplog, held_out=None) == []


def test_a_prompt_that_several_held_out_tasks_have_identifies_no_task(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = file_of(tmp_path / "a.jsonl", "Play the game.", "Play the game.")
    assert warnings_of([train, file_of(tmp_path / "b.jsonl", "Play the game.", "Play the game.")], caplog) == []


def test_of_large_files_a_sample_is_compared_and_the_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.launch.preflight.tasks.held_out.COMPARED", 2)
    train = file_of(tmp_path / "a.jsonl", "1+1?", "1+2?", "1+3?")
    [line] = warnings_of([train, file_of(tmp_path / "b.jsonl", "1+3?", "1+2?", "2+2?")], caplog)
    assert "data.eval: 1 of 2 held-out tasks" in line
    assert "only 2 rows of a file are compared" in line
