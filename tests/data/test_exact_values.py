"""A value of a JSON row is the same value, of the same type, wherever the row's task goes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data import rows as data_rows
from asyncrl.data import tables
from asyncrl.data.demonstrations import DemonstrationFile
from asyncrl.data.layout import AS_THEY_ARE, RowLayout
from asyncrl.data.made_rows import read_made, write_rows
from asyncrl.data.reading import TaskFile
from asyncrl.data.row_tasks import OPTIONAL, REQUIRED, RowReader
from asyncrl.data.sources import of_tasks, parts
from asyncrl.data.writing import write_tasks
from asyncrl.errors import DataError
from asyncrl.observe.kept.format import StepFile, encode_step
from asyncrl.replay import messages
from asyncrl.types import Purpose, Task, Ticket
from asyncrl.wire import Message, decode, encode, read_task, task_body
from tests.helpers import make_task
from tests.observe.kept.examples import example_step

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
LARGE = st.sampled_from([2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400])
NUMBERS = st.integers() | LARGE | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ROWS = st.fixed_dictionaries(
    {
        "truth": VALUES.filter(lambda value: value is not None),
        "extra": st.dictionaries(TEXTS.map("x{}".format), VALUES, max_size=3),
        "default": VALUES,
        "argument": VALUES,
    }
)


def row(truth: Any, extra: Any = None, default: Any = 1, argument: Any = 1) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": argument}}}
    schema = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"default": default}}}}
    return {
        "prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
        "data_source": "s",
        "reward_model": {"ground_truth": truth},
        "extra_info": extra or {},
        "tools": [schema],
    }


def seen(task: Task) -> str:
    """All values of a task, with their types."""
    return repr([task.ground_truth, task.extra_info, tuple(task.tools), list(task.messages)])


def written(given_row: dict[str, Any]) -> str:
    """The same values as their row has them."""
    truth, prompt = given_row["reward_model"]["ground_truth"], given_row["prompt"]
    return repr([truth, given_row["extra_info"], tuple(given_row["tools"]), prompt])


def made(path: Path, source: Path) -> TaskFile:
    write_rows(path, parts(str(source), REQUIRED, OPTIONAL), RowReader(AS_THEY_ARE))
    return TaskFile(path, rows=read_made(path))


def sent(task: Task) -> Task:
    return read_task(decode([bytes(each) for each in encode(Message("task", 0, task_body(task)))]).body)


def ticketed(task: Task) -> Task:
    """The task of a ticket that came from a replay."""
    ticket = Ticket("t", task, "g", 0, Purpose.TRAIN, 1.0, 0)
    frames = [bytes(each) for each in messages.encode_reply(messages.OK, 1, messages.Reply([ticket]))]
    return messages.decode_reply(frames).read(messages.TICKETS)[0].task


def kept(task: Task) -> Task:
    """The task in a sample of a step's episodes."""
    step = example_step(0, members=1, groups=1)
    step = replace(step, episodes=[replace(each, task=task) for each in step.episodes])
    found = StepFile(encode_step(step), Path("x")).episode(0).task
    assert found is not None
    return found


@pytest.mark.slow
@given(st.lists(ROWS, min_size=1, max_size=4), st.sampled_from(["jsonl", "json"]))
def test_values_of_any_json_rows_keep_their_types_on_every_way(
    tmp_path_factory: pytest.TempPathFactory, given_rows: list[dict[str, Any]], suffix: str
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    rows = [row(**each) for each in given_rows]
    path = folder / f"tasks.{suffix}"
    path.write_text("\n".join(map(json.dumps, rows)) if suffix == "jsonl" else json.dumps(rows))
    for tasks in (TaskFile(path), made(folder / "made.arrow", path)):
        for task, each in zip(tasks, rows, strict=True):
            assert seen(task) == written(each)
            for way in (sent, ticketed, kept):
                assert seen(way(task)) == written(each)


@pytest.mark.parametrize("at_once", [2, 10_000])
@pytest.mark.parametrize(
    "truths",
    [
        *([3, 0.5], [0.5, 3], [2**53 + 1, 0.5], [10**17, 0.5], [2**64, 1], [True, 2], [3, "x"], ["x", 3]),
        *(
            [[1, 2], [0.5]],
            [{"a": 1}, {"a": 0.5}],
            [{"a": 1}, [1]],
            [{"a": None}, {}],
            [[], [None]],
            [1, 2, 3.5, 4, "5"],
        ),
    ],
)
def test_the_values_of_other_rows_change_none(
    tmp_path: Path, truths: list[Any], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tables, data_rows):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", at_once)
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(row(truth, {"x": truth}, truth)) for truth in truths))
    for tasks in (TaskFile(path), made(tmp_path / "made.arrow", path)):
        assert repr([task.ground_truth for task in tasks]) == repr(truths)
        assert repr([task.extra_info["x"] for task in tasks]) == repr(truths)
        assert repr([task.tools[0]["parameters"]["properties"]["a"]["default"] for task in tasks]) == repr(truths)


def test_columns_that_the_configuration_names_keep_the_values_of_json(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    answers = [3, 0.5, [1], "x"]
    path.write_text("\n".join(json.dumps({"q": f"{each}?", "answer": {"value": each}}) for each in answers))
    layout = RowLayout({"prompt": "q", "ground_truth": "answer.value", "same": "answer.value"})
    tasks = TaskFile(path, layout=layout)
    assert repr([task.ground_truth for task in tasks]) == repr(answers)
    assert repr([task.extra_info["same"] for task in tasks]) == repr(answers)
    with pytest.raises(DataError, match=r"tasks.jsonl has no column answer.text, .* it has answer, q"):
        TaskFile(path, layout=RowLayout({"prompt": "q", "ground_truth": "answer.text"}))


def test_tasks_that_a_program_makes_keep_their_values(tmp_path: Path) -> None:
    tasks = [make_task(n, ground_truth=truth, extra_info={"v": truth}) for n, truth in enumerate([3, 0.5, "x", [None]])]
    path = tmp_path / "made.arrow"
    write_rows(path, of_tasks("program", tasks), RowReader(AS_THEY_ARE))
    found = TaskFile(path, rows=read_made(path))
    assert repr([task.ground_truth for task in found]) == repr([3, 0.5, "x", [None]])
    assert repr([task.extra_info["v"] for task in found]) == repr([3, 0.5, "x", [None]])
    assert [found.place(index) for index in (0, 3)] == ["program: row 0", "program: row 3"]


def test_a_parquet_file_that_would_change_values_is_not_written(tmp_path: Path) -> None:
    for truths in ([3, 0.5], [3, "x"]):
        with pytest.raises(DataError, match=r"t\.parquet"):
            write_tasks(tmp_path / "t.parquet", [make_task(n, ground_truth=each) for n, each in enumerate(truths)])
    assert not list(tmp_path.iterdir())
    write_tasks(tmp_path / "t.parquet", [make_task(n, ground_truth=each) for n, each in enumerate([[1], [2, 3]])])
    assert [task.ground_truth for task in TaskFile(tmp_path / "t.parquet")] == [[1], [2, 3]]


def test_demonstrations_in_json_keep_their_values(tmp_path: Path) -> None:
    given = [row(1, default=value, argument=value) for value in (3, 0.5, None, 2**64)]
    path = tmp_path / "shown.jsonl"
    path.write_text("\n".join(json.dumps({"messages": each["prompt"], "tools": each["tools"]}) for each in given))
    for found, each in zip(DemonstrationFile([path]), given, strict=True):
        assert repr([found.messages, list(found.tools)]) == repr([each["prompt"], each["tools"]])


def test_a_packed_row_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(row(1)))
    tasks = made(tmp_path / "made.arrow", path)
    part = tasks._rows.parts[0]
    object.__setattr__(part, "table", pa.table({"row": pa.array([b"\xc1"], pa.large_binary())}))
    with pytest.raises(DataError, match=r"tasks.jsonl: line 1 cannot be sent: a packed row is damaged"):
        tasks[0]


def test_rows_of_parquet_have_the_nulls_and_types_of_their_file(tmp_path: Path) -> None:
    truths = [{"target": 24, "numbers": [4, 6], "note": None}, {"target": 3, "numbers": [1], "note": "x"}]
    table = pa.Table.from_pylist([{**row(truth, {"hint": truth["note"]}), "tools": None} for truth in truths])
    pq.write_table(table, tmp_path / "tasks.parquet")
    for tasks in (TaskFile(tmp_path / "tasks.parquet"), made(tmp_path / "made.arrow", tmp_path / "tasks.parquet")):
        assert [task.ground_truth for task in tasks] == truths
        assert [task.extra_info for task in tasks] == [{"hint": None}, {"hint": "x"}]
