"""Tasks of environments of verifiers, as another Python writes them: here a program that says what a test wants. The
real package is in tests/environments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from asyncrl.data.command import convert
from asyncrl.data.reading import TaskFile
from asyncrl.errors import DataError

ROW = {
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "data_source": "verifiers/sums",
    "reward_model": {"ground_truth": "2"},
    "extra_info": {"index": 0, "split": "train", "verifiers": "{}"},
}


def other_python(folder: Path, code: str) -> str:
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport sys, json\n{code}\n")
    path.chmod(0o700)
    return str(path)


def test_the_other_python_is_asked_with_the_arguments_and_its_rows_are_tasks(tmp_path: Path):
    code = f"print(json.dumps({{**{ROW!r}, 'data_source': ' '.join(sys.argv[2:])}}))"
    more = {"python": other_python(tmp_path, code), "arguments": '{"size": 3}', "limit": 7}
    assert convert("verifiers", "sums", tmp_path / "tasks.parquet", "eval", say=lambda line: None, **more) == (1, 0)
    [task] = TaskFile(tmp_path / "tasks.parquet")
    assert task.data_source == 'tasks sums --args {"size": 3} --split eval --limit 7'
    assert task.ground_truth == "2"
    assert task.extra_info["verifiers"] == "{}"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"print(json.dumps({ROW!r})); print(json.dumps({{'error': 'it has two agents'}})); sys.exit(1)", "two agents"),
        ("sys.exit('no module named verifiers')", "sums: no module named verifiers"),
        ("sys.exit(3)", "ended with status 3"),
        ("print('hello')", "a line that is not a task"),
        ("print('{}')", "a line that is not a task"),
        ("", "no row that can become a task"),
    ],
)
def test_what_the_other_python_cannot_do_is_refused_with_its_reason(code: str, reason: str, tmp_path: Path):
    with pytest.raises(DataError, match=reason):
        convert("verifiers", "sums", tmp_path / "tasks.parquet", python=other_python(tmp_path, code))
    assert not (tmp_path / "tasks.parquet").exists()


def test_arguments_that_are_no_object_and_a_python_that_is_not_there_are_refused(tmp_path: Path):
    for arguments in ("[3]", "{", json.dumps("a")):
        with pytest.raises(DataError, match="must be a JSON object"):
            convert("verifiers", "sums", tmp_path / "tasks.parquet", python=sys.executable, arguments=arguments)
    with pytest.raises(DataError, match="cannot be started"):
        convert("verifiers", "sums", tmp_path / "tasks.parquet", python=str(tmp_path / "nowhere"))
