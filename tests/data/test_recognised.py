"""Columns of other data sets are recognised where their names are clear, and refused with the fix where not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from asyncrl.data.layout import RowLayout
from asyncrl.data.reading import TaskFile
from asyncrl.data.recognised import alike
from asyncrl.data.sources import parts
from asyncrl.errors import DataError
from asyncrl.types import TEXT_PROMPT

Row = Mapping[str, Any]
Write = Callable[[Path, Sequence[Row]], Path]
MESSAGES = [{"role": "user", "content": "1+1?"}]
WANTED = ("prompt", "data_source", "reward_model"), ("extra_info", "tools", "environment")


def as_parquet(folder: Path, rows: Sequence[Row]) -> Path:
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    pq.write_table(table, folder / "sums.parquet")
    return folder / "sums.parquet"


def as_lines(folder: Path, rows: Sequence[Row]) -> Path:
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "sums.jsonl"


FORMS = pytest.mark.parametrize("write", [as_parquet, as_lines])


@FORMS
@pytest.mark.parametrize(
    ("row", "truth", "extra"),
    [
        ({"prompt": "1+1?", "ground_truth": "2"}, "2", {TEXT_PROMPT: True}),
        ({"prompt": MESSAGES, "solution": "2"}, "2", {"solution": "2"}),
        (
            {"question": "1+1?", "answer": "2", "level": 3},
            "2",
            {"question": "1+1?", "answer": "2", "level": 3, TEXT_PROMPT: True},
        ),
        ({"problem": "1+1?", "solution": 2}, 2, {"problem": "1+1?", "solution": 2, TEXT_PROMPT: True}),
        ({"prompt": "1+1?", "question": "?", "answer": "2"}, "2", {"question": "?", "answer": "2", TEXT_PROMPT: True}),
    ],
)
def test_clear_names_need_no_columns(tmp_path: Path, write: Write, row: Row, truth: Any, extra: Row) -> None:
    (task,) = TaskFile(write(tmp_path, [row]))
    assert (task.ground_truth, task.data_source, dict(task.extra_info)) == (truth, "sums", extra)
    assert [dict(each) for each in task.messages] == MESSAGES


@FORMS
def test_rows_that_a_start_writes_are_recognised_alike(tmp_path: Path, write: Write) -> None:
    source = write(tmp_path, [{"question": "1+1?", "answer": "2"}])
    (part,) = parts(str(source), *WANTED)
    (row,) = part.rows
    assert row["reward_model"] == {"ground_truth": "2"}
    assert row["extra_info"] == {"question": "1+1?", "answer": "2", TEXT_PROMPT: True}


@FORMS
def test_a_text_in_verls_layout_becomes_a_message_and_other_columns_stay_ignored(tmp_path: Path, write: Write) -> None:
    row = {"prompt": "1+1?", "data_source": "a", "reward_model": {"ground_truth": "2"}, "more": 1}
    (task,) = TaskFile(write(tmp_path, [row]))
    assert ([dict(each) for each in task.messages], task.ground_truth, task.data_source) == (MESSAGES, "2", "a")
    assert dict(task.extra_info) == {TEXT_PROMPT: True}


@FORMS
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"problem": "1+1?", "answer": "2", "solution": "so 2"},
            r"columns answer and solution, and either may be the ground truth; it has answer, problem, solution: "
            r'name one, as data.columns="\{prompt: problem, ground_truth: answer\}"',
        ),
        (
            {"problem": "?", "question": "1+1?", "answer": "2"},
            r'columns question and problem.*data.columns="\{prompt: question, ground_truth: answer\}"',
        ),
        (
            {"prompt": MESSAGES},
            r"no column .*; it has prompt; name the column of the ground truth, or any column if the reward needs "
            r'none, as data.columns="\{prompt: prompt, ground_truth: prompt\}"',
        ),
        (
            {"prompt": "1+1?", "answer": "2", "solution": "so 2"},
            r'name one, as data.columns="\{prompt: prompt, ground_truth: answer\}"',
        ),
        (
            {"messages": MESSAGES, "answer": "2"},
            r'no column prompt, .*; name the columns, as data.columns="\{prompt: messages, ground_truth: answer\}"',
        ),
        (
            {"text": "1+1?"},
            r'no column prompt, .*; it has text; name .*, as data.columns="\{prompt: text, ground_truth: text\}"',
        ),
        (
            {"x": "1+1?", "y": "2"},
            r"no column prompt, .*; it has x, y; name the columns of the prompt and of the ground",
        ),
    ],
)
def test_unclear_names_are_refused_with_the_line_to_write(tmp_path: Path, write: Write, row: Row, reason: str) -> None:
    file = write(tmp_path, [row])
    with pytest.raises(DataError, match=reason) as refused:
        TaskFile(file)
    if line := re.search(r"data.columns=\"({.*})\"", str(refused.value)):
        (task,) = TaskFile(file, layout=RowLayout(yaml.safe_load(line[1])))
        assert [dict(each) for each in task.messages] == MESSAGES


@FORMS
@pytest.mark.parametrize(
    "columns", [{"solution": "answer"}, {"solution": "answer", "prompt": "question"}, {"solution": "answer", "a": "n"}]
)
def test_columns_that_are_added_leave_the_others_recognised(tmp_path: Path, write: Write, columns: Row) -> None:
    (task,) = TaskFile(write(tmp_path, [{"question": "1+1?", "answer": "2", "n": 3}]), layout=RowLayout(columns))
    assert ([dict(each) for each in task.messages], task.ground_truth) == (MESSAGES, "2")
    assert {"question": "1+1?", "answer": "2", "n": 3, "solution": "2"}.items() <= dict(task.extra_info).items()


@FORMS
def test_added_columns_stay_in_the_line_to_write(tmp_path: Path, write: Write) -> None:
    file = write(tmp_path, [{"query": "1+1?", "answer": "2", "n": 3}])
    line = r'it has answer, n, query; .* data.columns="\{prompt: query, ground_truth: answer, level: n\}"'
    with pytest.raises(DataError, match=line):
        TaskFile(file, layout=RowLayout({"level": "n"}))
    with pytest.raises(DataError, match=line):
        list(parts(str(file), *WANTED, RowLayout({"level": "n"})))


@pytest.mark.parametrize(
    ("wanted", "names", "found"),
    [
        ("solution", ["answer", "level", "prompt"], "answer"),
        ("answer", ["data_source", "prompt", "reward_model"], "reward_model.ground_truth"),
        ("question", ["problem", "answer"], "problem"),
        ("levels", ["level", "prompt"], "level"),
        ("solution", ["ground_truth", "solution"], "solution"),
        ("level", ["answer", "prompt"], None),
    ],
)
def test_the_column_that_a_parameter_probably_means_is_found(wanted: str, names: list[str], found: str | None) -> None:
    assert alike(wanted, names) == found


@FORMS
def test_named_columns_come_first(tmp_path: Path, write: Write) -> None:
    layout = RowLayout({"prompt": "problem", "ground_truth": "answer"})
    (task,) = TaskFile(write(tmp_path, [{"problem": "1+1?", "answer": "2", "solution": "so 2"}]), layout=layout)
    assert (task.ground_truth, dict(task.extra_info)) == ("2", {TEXT_PROMPT: True})


@FORMS
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("lacks", ["question", "answer"])
def test_a_row_without_its_prompt_or_truth_is_refused_by_its_place_and_that_column(
    tmp_path: Path, write: Write, first: bool, lacks: str
) -> None:
    whole = {"question": "1+1?", "answer": "2"}
    part = {name: value for name, value in whole.items() if name != lacks}
    file = write(tmp_path, [part, whole] if first else [whole, part])
    number = (0 if first else 1) + (file.suffix == ".jsonl")
    place = rf"sums\.\w+: (line|row) {number} has no value in column {lacks}; mend or drop the row"
    for layout in (RowLayout(), RowLayout({"prompt": "question", "ground_truth": "answer"})):
        with pytest.raises(DataError, match=place):
            TaskFile(file, layout=layout)
        with pytest.raises(DataError, match=place):
            list(parts(str(file), *WANTED, layout))


@FORMS
def test_a_column_that_a_row_lacks_is_none_there(tmp_path: Path, write: Write) -> None:
    rows = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "1+1?", "answer": "2", "level": 3}]
    for given in (rows, rows[::-1]):
        tasks = TaskFile(write(tmp_path, given))
        assert [task.extra_info["level"] for task in tasks] == [each.get("level") for each in given]
        assert [[*task.extra_info] for task in tasks] == [[*tasks[0].extra_info]] * 2, "in the same order in all rows"


@FORMS
def test_a_row_without_the_data_source_that_others_have_is_refused(tmp_path: Path, write: Write) -> None:
    row = {"prompt": "1+1?", "answer": "2", "data_source": "a"}
    with pytest.raises(DataError, match=r"(line 2|row 1), column data_source is null"):
        TaskFile(write(tmp_path, [row, {"prompt": "1+1?", "answer": "2"}]))


def test_prompts_of_json_may_be_texts_and_messages_in_one_file(tmp_path: Path) -> None:
    tasks = TaskFile(as_lines(tmp_path, [{"prompt": each, "answer": "2"} for each in ("1+1?", MESSAGES)]))
    assert [[dict(each) for each in task.messages] for task in tasks] == [MESSAGES, MESSAGES]
    assert [TEXT_PROMPT in task.extra_info for task in tasks] == [True, False]


def test_a_table_in_another_format_is_refused_with_the_formats_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\n1+1?,2\n")
    with pytest.raises(DataError, match=r"end in \.csv are not read, only \.parquet, \.jsonl, \.json; convert"):
        TaskFile(tmp_path / "a.csv")
