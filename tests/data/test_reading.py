"""Task files in verl's layout: what is taken as it is, and what is refused at the door."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.reading import TaskFile
from asyncrl.data.writing import write_tasks
from asyncrl.errors import DataError
from asyncrl.types import Task, without_nulls
from asyncrl.wire import Message, decode, encode, read_task, task_body
from tests.helpers import make_task

SCHEMA = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}


def row(**changes: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": "What is 2+2?"}],
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 7, "split": "train"},
        **changes,
    }


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "tasks.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_some_tasks_are_spread_evenly_over_the_rows_and_keep_their_ids(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.parquet", [make_task(row) for row in range(9)])
    tasks = TaskFile(tmp_path / "tasks.parquet")
    few = tasks.spread(3)
    assert [task.id for task in few] == [tasks[row].id for row in (0, 4, 8)]
    assert few.place(1).endswith("row 4")
    assert [task.id for task in few.spread(2)] == [tasks[row].id for row in (0, 8)]
    assert list(tasks.spread(20)) == list(tasks)


def test_a_verl_row_becomes_a_task(tmp_path: Path) -> None:
    (task,) = TaskFile(written(tmp_path, row()))
    assert task == Task(
        id="openai/gsm8k/train/7",
        messages=[{"role": "user", "content": "What is 2+2?"}],
        ground_truth="4",
        data_source="openai/gsm8k",
        extra_info={"index": 7, "split": "train"},
    )


def test_a_row_needs_only_messages_a_source_and_a_ground_truth(tmp_path: Path) -> None:
    least = {"prompt": row()["prompt"], "data_source": "mine", "reward_model": {"ground_truth": ""}}
    (task,) = TaskFile(written(tmp_path, least))
    assert task == Task(id="mine/tasks/0", messages=least["prompt"], ground_truth="", data_source="mine")


def test_tools_kwargs_stay_in_the_extra_info_with_the_nulls_that_verl_sees(tmp_path: Path) -> None:
    first = {"calculator": {"create_kwargs": {"precision": 2}}}
    second = {"search": {"create_kwargs": {"engine": "local"}}}
    rows = [row(extra_info={"index": i, "tools_kwargs": kwargs}) for i, kwargs in enumerate((first, second))]
    tasks = TaskFile(written(tmp_path, *rows))
    assert [task.tools_kwargs for task in tasks] == [{**first, "search": None}, {"calculator": None, **second}]
    assert tasks[0].extra_info == {"index": 0, "tools_kwargs": tasks[0].tools_kwargs}


@pytest.mark.parametrize("tools", [[SCHEMA], json.dumps([SCHEMA]), [json.dumps(SCHEMA)]])
def test_tools_come_as_structs_or_as_json_text(tmp_path: Path, tools: Any) -> None:
    assert TaskFile(written(tmp_path, row(tools=tools)))[0].tools == (SCHEMA,)


@pytest.mark.parametrize(
    ("truth", "text"),
    [
        *((72, "72"), (0.5, "0.5"), (True, "true"), ("x", "x"), ('["x"]', '["x"]'), ("", "")),
        *(
            (["4", "vier ü"], '["4", "vier ü"]'),
            ({"target": 24, "numbers": [4, 6]}, '{"target": 24, "numbers": [4, 6]}'),
        ),
    ],
)
def test_a_ground_truth_is_what_its_row_has_and_has_a_text(tmp_path: Path, truth: Any, text: str) -> None:
    task = TaskFile(written(tmp_path, row(reward_model={"ground_truth": truth})))[0]
    assert (repr(task.ground_truth), task.truth_text) == (repr(truth), text)


def test_nulls_of_truths_and_of_extra_info_stay_and_are_no_part_of_the_text(tmp_path: Path) -> None:
    given = [({"a": 1, "b": None}, {"index": 0, "hint": None}), ({"a": 2, "b": [None]}, {"index": 1, "hint": "x"})]
    tasks = TaskFile(
        written(tmp_path, *(row(reward_model={"ground_truth": truth}, extra_info=extra) for truth, extra in given))
    )
    assert [(task.ground_truth, task.extra_info) for task in tasks] == given
    assert [task.truth_text for task in tasks] == ['{"a": 1}', '{"a": 2, "b": [null]}']


def test_a_list_column_of_the_large_kind_is_a_list(tmp_path: Path) -> None:
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    table = pa.Table.from_pylist([row()])
    column = pa.array(table.column("prompt").to_pylist(), pa.large_list(message))
    pq.write_table(table.set_column(0, "prompt", column), tmp_path / "large.parquet")
    assert len(TaskFile(tmp_path / "large.parquet")) == 1


@pytest.mark.parametrize(
    "extras",
    [
        [None, None],
        [{"split": "train"}, {"split": "train"}],
        [{"index": 3, "split": "train"}, {"index": 3, "split": "train"}],
        [{"index": 3, "split": "train"}, {"index": None, "split": "train"}],
    ],
)
def test_ids_are_row_numbers_where_indices_do_not_tell_rows_apart(tmp_path: Path, extras: list[Any]) -> None:
    tasks = TaskFile(written(tmp_path, *(row(extra_info=extra or {"note": "none"}) for extra in extras)))
    split = "tasks" if extras[0] is None else "train"
    assert [task.id for task in tasks] == [f"openai/gsm8k/{split}/0", f"openai/gsm8k/{split}/1"]


def test_equal_indices_in_different_splits_or_sources_stay(tmp_path: Path) -> None:
    rows = [row(), row(extra_info={"index": 7, "split": "test"}), row(data_source="other")]
    assert [task.id for task in TaskFile(written(tmp_path, *rows))] == [
        "openai/gsm8k/train/7",
        "openai/gsm8k/test/7",
        "other/train/7",
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"data_source": "x", "reward_model": {"ground_truth": "1"}}], "no column prompt; it has data_source"),
        ([row(prompt=22)], "column prompt must be a list of messages"),
        ([row(), row(prompt=[])], "row 1, column prompt has no messages; mend or drop"),
        ([row(), row(data_source=None)], "row 1, column data_source is null"),
        ([row(reward_model={"style": "rule"})], "reward_model must be a struct with a field ground_truth"),
        ([row(), row(reward_model={"ground_truth": None})], "row 1, column reward_model.ground_truth is null"),
        ([row(extra_info='{"index": 0}')], "extra_info must be a struct"),
        ([row(), row(prompt=[{"role": None, "content": "x"}])], "row 1 cannot be sent: .*without a role"),
        ([row(), row(prompt=[None, {"role": "user", "content": "x"}])], "row 1 cannot be sent: .*without a role"),
        ([row(prompt=[{"role": 3, "content": "x"}])], "the role of a message must be text"),
        ([row(extra_info={"tools_kwargs": "calculator"})], "tools_kwargs must be a struct"),
        ([row(extra_info={"tools_kwargs": ["calculator"]})], "tools_kwargs must be a struct"),
        ([row(tools=3)], "column tools is neither"),
        ([row(tools=[3])], "column tools is neither"),
        ([row(tools=[{"type": "function"}])], "row 0, column tools.*a schema must be"),
        ([row(tools=[SCHEMA]), row(tools=[{"function": {"name": None}}])], "row 1, column tools.*a schema must be"),
        ([row(extra_info=json.loads('{"x": ' * 70 + "1" + "}" * 70))], "nested 71 deep"),
        *(
            ([row(tools=tools)], "row 0, column tools")
            for tools in (
                ['{"name": "add"}', None],
                [{"name": "add", "parameters": "none"}],
                [{"type": "function", "function": {"name": "add", "parameters": 4}}],
                [{"name": 4, "parameters": {"x": "y"}}],
            )
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_when_it_is_opened_with_row_and_column(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        TaskFile(written(tmp_path, *rows))


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ("{oops", "neither schemas nor JSON text"),
        (json.dumps([{**SCHEMA, "title": "half of a pair: \ud800"}]), "surrogates not allowed"),
        (json.dumps([{**SCHEMA, "limit": float("nan")}]), "NaN is not a JSON number"),
        (json.dumps([{**SCHEMA, "limit": float("-inf")}]), "Infinity is not a JSON number"),
        ("[" * 100_000, "recursion"),
        (json.dumps([SCHEMA])[:-1] + ", " + "[" * 70 + "]" * 70 + "]", "a schema must be"),
        (json.dumps([{**SCHEMA, "x": json.loads("[" * 70 + "]" * 70)}]), "more than 64 deep"),
        (json.dumps(["calculator"]), "a schema must be"),
        (json.dumps(3), "a schema must be"),
        (json.dumps([{"type": "function", "function": {"description": "no name"}}]), "a schema must be"),
    ],
)
@pytest.mark.parametrize("as_list", [False, True])
def test_tools_that_no_message_can_carry_are_refused_at_the_start_with_their_row(
    tmp_path: Path, tools: str, reason: str, as_list: bool
) -> None:
    good, bad = (json.dumps([SCHEMA]), tools)
    rows = [row(tools=[each] if as_list else each) for each in (good, bad, good)]
    with pytest.raises(DataError, match=rf"tasks.parquet: row 1, column tools.*({reason})"):
        TaskFile(written(tmp_path, *rows))


def test_text_that_is_no_utf_8_is_refused_at_the_start_with_its_row(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row(), row(), row()])
    sources = pa.array([b"one", b"two \xff", b"three"], pa.binary()).view(pa.string())
    pq.write_table(table.set_column(table.column_names.index("data_source"), "data_source", sources), tmp_path / "bad")
    with pytest.raises(DataError, match=r"bad: row 1 cannot be sent: .*utf-8"):
        TaskFile(tmp_path / "bad")


def test_what_pandas_makes_of_missing_values_is_taken(tmp_path: Path) -> None:
    extra = {"index": 0, "share": float("nan"), "large": 2**63 - 1, "raw": b"x", "day": datetime.date(2026, 1, 1)}
    (task,) = TaskFile(written(tmp_path, row(extra_info=extra, reward_model={"ground_truth": [b"x"]})))
    sent = decode([bytes(frame) for frame in encode(Message("task", 0, task_body(task)))]).body
    assert math.isnan(sent["extra_info"]["share"])
    assert sent["extra_info"]["large"] == 2**63 - 1
    assert sent["extra_info"]["day"] == "2026-01-01"


@pytest.mark.parametrize("content", [None, b"question,answer\n"])
def test_what_is_no_parquet_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tasks.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        TaskFile(path)


def test_rows_are_sliced_and_end_where_the_file_ends(tmp_path: Path) -> None:
    tasks = TaskFile(written(tmp_path, *(row(extra_info={"index": i}) for i in range(5))))
    assert [task.id[-1] for task in tasks[1:4]] == ["1", "2", "3"]
    assert len(list(tasks)) == len(tasks) == 5
    with pytest.raises(IndexError):
        tasks[5]


def test_data_sources_and_splits_may_be_categories_as_pandas_writes_them(tmp_path: Path) -> None:
    table = pa.table(
        {
            "prompt": [row()["prompt"]] * 3,
            "data_source": pa.array(["a", "b", "b"]).dictionary_encode(),
            "reward_model": [{"ground_truth": "4"}] * 3,
            "extra_info": pa.StructArray.from_arrays(
                [pa.array([0, 1, 2]), pa.array(["x", "x", "y"]).dictionary_encode()], ["index", "split"]
            ),
        }
    )
    pq.write_table(table, tmp_path / "tasks.parquet")
    tasks = TaskFile(tmp_path / "tasks.parquet")
    assert [task.id for task in tasks] == ["a/x/0", "b/x/1", "b/y/2"]
    assert list(tasks.by_source()) == [0, 1]


@pytest.mark.parametrize(
    ("column", "changes"),
    [
        ("data_source", {"data_source": ["a"]}),
        ("extra_info.split", {"extra_info": {"index": 1, "split": ["x"]}}),
        ("extra_info.split", {"extra_info": {"index": 1, "split": b"\xff"}}),
    ],
)
def test_what_becomes_part_of_an_id_must_be_text(tmp_path: Path, column: str, changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=rf"tasks.parquet: {column} must be text, not (list|binary)"):
        TaskFile(written(tmp_path, row(**changes)))


@pytest.mark.parametrize(
    "times",
    [
        pa.array([0, 2**62], pa.duration("s")),
        pa.array([0, 2**30], pa.date32()),
        pa.array([[0], [2**30]], pa.list_(pa.date32())),
        pa.array([0, 1], pa.timestamp("s", "No/Where")),
    ],
)
def test_times_that_have_no_value_in_python_are_refused_when_the_file_is_opened(
    tmp_path: Path, times: pa.Array
) -> None:
    table = pa.Table.from_pylist([row(), row()])
    extra = pa.StructArray.from_arrays([pa.array([0, 1]), times], ["index", "when"])
    path = tmp_path / "tasks.parquet"
    pq.write_table(table.set_column(table.column_names.index("extra_info"), "extra_info", extra), path)
    with pytest.raises(DataError, match=r"tasks.parquet: row [01] cannot be sent: .*mend or drop the row"):
        TaskFile(path)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.mark.slow
@given(st.lists(st.tuples(texts, texts, st.dictionaries(st.sampled_from("abc"), texts, max_size=2)), min_size=1))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, ...]]) -> None:
    tasks = [
        Task(
            id=f"made/up/{number}",
            messages=[{"role": "user", "content": content}],
            ground_truth=truth,
            data_source="made",
            tools=[SCHEMA] if kwargs else (),
            extra_info={"index": number, "split": "up", **({"tools_kwargs": {"calculator": kwargs}} if kwargs else {})},
        )
        for number, (content, truth, kwargs) in enumerate(rows)
    ]
    path = tmp_path_factory.getbasetemp() / "round.parquet"
    assert write_tasks(path, tasks) == len(tasks)
    for task, read in zip(tasks, TaskFile(path), strict=True):
        assert (read.id, read.messages, read.ground_truth) == (task.id, task.messages, task.ground_truth)
        assert (without_nulls(read.tools_kwargs), list(read.tools)) == (task.tools_kwargs, list(task.tools))


def test_messages_may_have_images_beside_text(tmp_path: Path) -> None:
    blocks = [{"type": "image", "image": b"\x89PNG"}, {"type": "text", "text": "What is this?"}]
    struct = [{"type": "image", "image": {"bytes": b"\x89PNG", "path": "a.png"}}]
    for content in (blocks, struct):
        (task,) = TaskFile(written(tmp_path, row(prompt=[{"role": "user", "content": content}])))
        assert task.messages == [{"role": "user", "content": content}]
        sent = decode(encode(Message("task", 0, {"task": task_body(task)})))
        assert read_task(sent.body["task"]).messages == task.messages
