"""GSM8K's published JSON lines as tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.data.command import convert
from asyncrl.data.reading import TaskFile
from asyncrl.errors import DataError

EXCERPT = Path(__file__).parent / "gsm8k"


def test_the_published_lines_become_tasks_with_the_number_as_ground_truth(tmp_path: Path) -> None:
    assert convert("gsm8k", str(EXCERPT), tmp_path / "gsm8k.parquet") == (50, 0)
    tasks = TaskFile(tmp_path / "gsm8k.parquet")
    first = tasks[0]
    assert (first.id, first.ground_truth) == ("openai/gsm8k/train/0", "72")
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert first.messages[1]["content"].startswith("Natalia sold clips to 48 of her friends")
    assert len({task.id for task in tasks}) == 50
    assert all(task.ground_truth.lstrip("-").isdigit() for task in tasks)


def test_thousands_separators_and_unicode_line_separators_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"question": "a\u2028b", "answer": "so\\n#### 1,250"}\n', "utf-8")
    assert convert("gsm8k", str(tmp_path), tmp_path / "out.parquet", "test") == (1, 0)
    (task,) = TaskFile(tmp_path / "out.parquet")
    assert (task.ground_truth, task.messages[1]["content"]) == ("1250", "a\u2028b")


@pytest.mark.parametrize("line", ["no json", "[]", '{"question": "?"}', '{"question": "?", "answer": "four"}'])
def test_a_line_that_is_none_of_theirs_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.jsonl").write_text(f'{{"question": "?", "answer": "#### 4"}}\n{line}\n')
    with pytest.raises(DataError, match="line 2"):
        convert("gsm8k", str(tmp_path), tmp_path / "out.parquet")


def test_a_folder_without_the_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"test\.jsonl does not exist"):
        convert("gsm8k", str(tmp_path), tmp_path / "out.parquet", "test")


def test_a_split_that_gsm8k_does_not_have_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tset\.jsonl does not exist; the splits of GSM8K are train and test$"):
        convert("gsm8k", str(EXCERPT), tmp_path / "out.parquet", "tset")


@pytest.mark.parametrize(("name", "more"), [("train.jsonl", ""), ("test.jsonl", " --split test")])
def test_a_file_as_the_source_is_refused_with_its_folder(tmp_path: Path, name: str, more: str) -> None:
    file = tmp_path / name
    file.touch()
    with pytest.raises(DataError) as refused:
        convert("gsm8k", str(file), tmp_path / "out.parquet")
    assert str(refused.value) == f"{file} is a file; name its folder: --source {tmp_path}{more}"
