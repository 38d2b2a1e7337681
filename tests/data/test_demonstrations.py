"""Demonstrations from files: the columns that are read, and what is refused with its row and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config.schema import RunConfig, TrainConfig
from asyncrl.data.demonstrations import Demonstration, DemonstrationFile
from asyncrl.data.from_config import run_demonstrations
from asyncrl.data.rendered import RenderedDemonstrations, read_rendered, save_array, write_rendered
from asyncrl.errors import DataError
from asyncrl.machine.files import NO_ROOM

USER, SAYS = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(**arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def opened(folder: Path, *rows: dict[str, Any]) -> DemonstrationFile:
    path = folder / "shown.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return DemonstrationFile([path])


def test_messages_lose_only_the_nulls_that_parquet_adds(tmp_path: Path) -> None:
    calls = [call(a=1), call(b=2)]
    found = opened(tmp_path, *({"messages": [USER, each, SAYS]} for each in calls))
    for shown, each in zip(found, calls, strict=True):
        expected = {key: value for key, value in each.items() if value is not None}
        assert shown == Demonstration([USER, expected, SAYS])


def test_messages_and_tools_may_be_json_text(tmp_path: Path) -> None:
    (shown,) = opened(tmp_path, {"messages": json.dumps([USER, SAYS]), "tools": json.dumps([TOOL])})
    assert shown == Demonstration([USER, SAYS], (TOOL,))


@pytest.mark.parametrize("prompt", ["2+2?", [USER], json.dumps([USER])])
def test_a_prompt_and_a_response_are_a_conversation(tmp_path: Path, prompt: Any) -> None:
    assert list(opened(tmp_path, {"prompt": prompt, "response": "4"})) == [Demonstration([USER, SAYS], context=1)]


@pytest.mark.parametrize(
    ("bad", "column", "why"),
    [
        ({"messages": None}, "messages", "there are no messages"),
        ({"messages": "[]"}, "messages", "there are no messages"),
        ({"messages": "[1"}, "messages", "Expecting"),
        ({"messages": '[{"content": "x"}]'}, "messages", "must have a role"),
        ({"messages": '[{"role": "user", "content": NaN}]'}, "messages", "NaN is not a JSON number"),
        ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, "messages", "surrogates not allowed"),
        ({"messages": json.dumps([USER, SAYS]), "tools": "{}"}, "tools", "a schema must be"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_with_its_column(
    tmp_path: Path, bad: dict[str, Any], column: str, why: str
) -> None:
    good = {"messages": json.dumps([USER, SAYS]), "tools": json.dumps([TOOL])}
    found = opened(tmp_path, good, {**dict.fromkeys(good), **bad})
    assert len(found[0].messages) == 2
    with pytest.raises(DataError, match=f"shown.parquet: row 1, column {column}: .*{why}"):
        found[1]


def test_a_prompt_without_a_response_is_refused(tmp_path: Path) -> None:
    found = opened(tmp_path, {"prompt": "a", "response": "b"}, {"prompt": "a", "response": None})
    with pytest.raises(DataError, match="row 1, column response: it must be text"):
        found[1]


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="need a column messages, or the columns prompt and response"):
        opened(tmp_path, {"prompt": "a"})


def test_an_array_for_which_there_is_no_room_says_so() -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        save_array(np.zeros(1 << 16, np.int32), Path("/dev/full"))
    assert caught.value.errno in NO_ROOM


def test_rendered_demonstrations_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [(pa.array(ids).to_numpy().astype("int32"), pa.array(ids).to_numpy() > 2) for ids in ([1, 3], [5, 2, 4])]
    written = RenderedDemonstrations.of(rows, cut=1, left_out=2)
    with pytest.raises(DataError, match="`asyncrl sft` render them"):
        read_rendered(tmp_path / "rendered")
    write_rendered(written, tmp_path / "rendered")
    found = read_rendered(tmp_path / "rendered")
    assert (len(found), found.cut, found.left_out, found.digest) == (2, 1, 2, written.digest)
    assert (found.lengths.tolist(), found.trained.tolist()) == ([2, 3], [1, 2])
    for index, (ids, mask) in enumerate(rows):
        assert [each.tolist() for each in found.row(index)] == [ids.tolist(), mask.tolist()]
    assert RenderedDemonstrations.of(rows[::-1]).digest != written.digest


def test_a_run_that_is_trained_again_from_its_store_has_the_demonstrations_of_its_start(tmp_path: Path) -> None:
    sources = [str(tmp_path / "shown.jsonl")]
    (tmp_path / "shown.jsonl").write_text('{"prompt": "a", "response": "b"}')
    first, again = (TrainConfig(run=RunConfig(name=name, dir=str(tmp_path))) for name in ("first", "again"))
    rendered = RenderedDemonstrations.of([(np.arange(4, dtype=np.int32), np.ones(4, np.bool_))])
    write_rendered(rendered, run_demonstrations(first).folder(sources))
    with pytest.raises(DataError, match="cannot be read"):
        run_demonstrations(again).read(sources)
    again.replay.source = str(tmp_path / "first" / "replay")
    assert run_demonstrations(again).read(sources).digest == rendered.digest
    own = RenderedDemonstrations.of([(np.arange(5, dtype=np.int32), np.ones(5, np.bool_))])
    write_rendered(own, run_demonstrations(again).folder(sources))
    assert run_demonstrations(again).read(sources).digest == own.digest
