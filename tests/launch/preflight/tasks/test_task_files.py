"""The files of tasks are read before other checks, and each key's problem is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import DataConfig
from asyncrl.data.opening import Rendering, RunTasks
from asyncrl.errors import DataError
from asyncrl.launch.preflight.tasks.task_files import read_files

ROW = {"prompt": "1+1?", "answer": "2"}


def tasks_of(folder: Path, train: list[str], evaluation: list[str] | None = None, **options: Any) -> RunTasks:
    return RunTasks(DataConfig(train=train, eval=evaluation, **options), folder / "run", Rendering([], []))


def lines(path: Path, *rows: dict[str, str]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_each_file_is_read_once(tmp_path: Path) -> None:
    first, second = lines(tmp_path / "a.jsonl", ROW), lines(tmp_path / "b.jsonl", ROW, ROW)
    read = read_files(tasks_of(tmp_path, [first], [second]))
    assert {key: len(tasks) for key, tasks in read.items()} == {"data.train": 1, "data.eval": 2}
    assert list(read_files(tasks_of(tmp_path, [first], [first]))) == ["data.train"]


def test_every_key_with_a_wrong_column_has_its_line(tmp_path: Path) -> None:
    first, second = lines(tmp_path / "a.jsonl", {"x": "1"}), lines(tmp_path / "b.jsonl", ROW, {"prompt": "1+2?"})
    with pytest.raises(DataError) as refused:
        read_files(tasks_of(tmp_path, [first], [second]))
    first_line, second_line = str(refused.value).splitlines()
    assert "a.jsonl has no column prompt" in first_line
    assert second_line.endswith("b.jsonl: line 2 has no value in column answer; mend or drop the row")


def test_missing_files_and_tasks_that_the_start_makes_are_left_to_other_checks(tmp_path: Path) -> None:
    there = lines(tmp_path / "a.jsonl", ROW)
    assert list(read_files(tasks_of(tmp_path, [str(tmp_path / "none.jsonl")], [there]))) == ["data.eval"]
    assert read_files(tasks_of(tmp_path, ["hub:a/b?split=train"], ["hf://datasets/a/b"])) == {}
    assert read_files(tasks_of(tmp_path, [there], keep_in_memory=False)) == {}


def test_held_out_tasks_of_reasoning_gym_must_not_be_training_tasks(tmp_path: Path) -> None:
    train, seed = ["reasoning-gym:sums?size=100"], "reasoning-gym:sums?size=10&seed="
    with pytest.raises(DataError, match=r"data\.eval: reasoning-gym:sums.*seed=100 or a larger seed"):
        read_files(tasks_of(tmp_path, train, [f"{seed}1"]))
    assert read_files(tasks_of(tmp_path, train, [f"{seed}100"])) == {}
