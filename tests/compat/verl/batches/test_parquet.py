"""Batches as Parquet and back, and verl's task files as batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.compat.verl import DataProto, from_trajectories, read_parquet, to_labels, to_trajectories, write_parquet
from asyncrl.compat.verl.batches.fields import objects
from asyncrl.compat.verl.batches.merging import equal
from asyncrl.compat.verl.batches.parquet import METADATA
from asyncrl.data.reading import TaskFile
from asyncrl.data.writing import write_tasks
from asyncrl.errors import DataError, DataProtoError
from asyncrl.types import Trajectory
from tests.compat.verl.test_trajectories import make_branches, make_tool_episode, sent
from tests.helpers import make_labels, make_task
from tests.test_wire import trajectories


def test_numbers_of_every_kind_and_shape_come_back(tmp_path: Path) -> None:
    tensors = {
        "half": torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16),
        "mask": torch.tensor([[True, False], [False, False]]),
        "deep": torch.arange(12, dtype=torch.int32).reshape(2, 3, 2),
        "none": torch.zeros(2, 0),
        "one": torch.tensor([0.5, float("nan")], dtype=torch.float64),
    }
    arrays = {"pair": np.arange(4, dtype=np.float32).reshape(2, 2), "text": np.array(["a", "b"], object)}
    write_parquet(DataProto.from_dict(tensors, arrays, {"step": 3}), tmp_path / "batch.parquet")
    found = read_parquet(tmp_path / "batch.parquet")
    assert {name: str(each.dtype) for name, each in found.batch.items()} == {
        name: str(each.dtype) for name, each in tensors.items()
    }
    assert all(equal(found.batch[name].float().numpy(), each.float().numpy()) for name, each in tensors.items())
    assert all(equal(found.non_tensor_batch[name], each) for name, each in arrays.items())
    assert found.meta_info == {"step": 3}
    columns = pq.read_table(tmp_path / "batch.parquet")
    assert columns.column("deep").to_pylist()[0] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.slow
@given(st.lists(trajectories(), min_size=1, max_size=3, unique_by=lambda each: each.id))
def test_trajectories_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, given_ones: list[Trajectory]
) -> None:
    path = tmp_path_factory.mktemp("batch") / "batch.parquet"
    write_parquet(from_trajectories(given_ones, 0), path)
    assert [sent(each) for each in to_trajectories(read_parquet(path))] == [sent(each) for each in given_ones]


def test_a_batch_with_tasks_is_a_task_file_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "batch.parquet"
    kwargs = {"calculator": {"create_kwargs": {"precision": 3}}}
    tasks = [make_task(0, extra_info={"index": 0}, tools_kwargs=kwargs), make_task(1, extra_info={"index": 1, "x": 2})]
    episodes = [make_tool_episode(id="a", task_id="task-0"), make_branches(id="b", task_id="task-1")]
    labels = [make_labels("a", 1.0), make_labels("b", -0.5)]
    data = from_trajectories(episodes, 0, labels, {task.id: task for task in tasks})
    write_parquet(data, path)

    found = read_parquet(path)
    assert found.non_tensor_batch.keys() == data.non_tensor_batch.keys()
    assert all(equal(found.non_tensor_batch[name], each) for name, each in data.non_tensor_batch.items())
    assert all(torch.equal(found.batch[name], each) for name, each in data.batch.items())
    assert [sent(each) for each in to_trajectories(found)] == [sent(each) for each in episodes]
    assert [sent(each) for each in to_labels(found)] == [sent(each) for each in labels]
    read = TaskFile(path)
    assert [read[row].ground_truth for row in range(3)] == ["1", "2", "2"]
    assert read[0].tools_kwargs == kwargs


def test_a_task_file_has_the_fields_that_verls_data_set_gives(tmp_path: Path) -> None:
    kwargs = {"calculator": {"create_kwargs": {"precision": 3}}}
    tasks = [make_task(0, extra_info={"index": 7}, tools_kwargs=kwargs), make_task(1, extra_info={"index": 8})]
    write_tasks(tmp_path / "tasks.parquet", tasks)
    data = read_parquet(tmp_path / "tasks.parquet")
    assert (data.batch, len(data)) == (None, 2)
    row: dict[str, Any] = data[0].non_tensor_batch
    assert row["raw_prompt"] == [{"role": "user", "content": "0+1"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1"}
    assert (row["data_source"], row["index"], row["tools_kwargs"]) == ("test", 7, kwargs)
    assert data[1].non_tensor_batch["tools_kwargs"] == data[1].non_tensor_batch["interaction_kwargs"] == {}


def test_values_that_do_not_come_back_are_refused_by_name(tmp_path: Path) -> None:
    data = DataProto.from_dict(non_tensors={"image": np.array([tmp_path, 1], dtype=object)})
    with pytest.raises(DataProtoError, match="image has a value that neither"):
        write_parquet(data, tmp_path / "batch.parquet")
    assert list(tmp_path.iterdir()) == []


def test_objects_of_several_types_are_kept_as_json(tmp_path: Path) -> None:
    values = [{"a": 1}, {}, None, "text", [1, "x"]]
    numbers = [1, 1.0, True, float("nan"), 2]
    data = DataProto.from_dict(non_tensors={"any": objects(values), "numbers": objects(numbers)})
    write_parquet(data, tmp_path / "batch.parquet")
    found = read_parquet(tmp_path / "batch.parquet").non_tensor_batch
    assert found["any"].tolist() == values
    assert repr(found["numbers"].tolist()) == repr(numbers)


def test_texts_shapes_of_objects_and_fields_that_are_empty_in_all_rows_come_back(tmp_path: Path) -> None:
    table = np.empty((2, 1), dtype=object)
    table[:] = [[{"a": 1}], [None]]
    arrays = {
        "source": np.array(["a", "bcd"]),
        "code": np.array([b"x", b"yz"]),
        "table": table,
        "odd": objects(["\ud800", "x"]),
        "extra_info": objects([{}, {}]),
        "tools_kwargs": objects([{}, {}]),
    }
    write_parquet(DataProto.from_dict(non_tensors=arrays), tmp_path / "batch.parquet")
    found = read_parquet(tmp_path / "batch.parquet").non_tensor_batch
    assert found.keys() == arrays.keys()
    assert all(equal(found[name], each) for name, each in arrays.items())


def test_a_batch_of_only_empty_fields_keeps_its_rows(tmp_path: Path) -> None:
    write_parquet(DataProto.from_dict(non_tensors={"extra_info": objects([{}, {}])}), tmp_path / "batch.parquet")
    assert read_parquet(tmp_path / "batch.parquet").non_tensor_batch["extra_info"].tolist() == [{}, {}]


@pytest.mark.parametrize(
    ("tensors", "arrays", "message"),
    [
        ({"x": torch.zeros(2, dtype=torch.complex64)}, {}, "'x' has torch.complex64, which Parquet lacks"),
        ({"x": torch.zeros(2).to(torch.float8_e5m2)}, {}, "'x' has torch.float8_e5m2, which Parquet lacks"),
        ({}, {"day": np.array(["2020-01-01"], dtype="M8[D]")}, r"'day' is an array of datetime64\[D\]"),
        (
            {},
            {"prompt": ["a"], "raw_prompt": objects([[{"role": "user"}]])},
            "an array has that name too: rename the array",
        ),
        ({}, {"extra_info": objects([{"a": 1}, {"a": "x"}])}, "'extra_info' has rows that do not go into one column"),
    ],
)
def test_a_field_that_would_come_back_as_another_is_refused(
    tensors: Any, arrays: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataProtoError, match=message):
        write_parquet(DataProto.from_dict(tensors, arrays), tmp_path / "batch.parquet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "rows"),
    [
        ({}, [[1.0], [2.0, 3.0, 4.0]]),
        ({}, [[1.0, None], [3.0, 4.0]]),
        ({}, ["x", "y"]),
        ({"tensors": {"a": ["float32", [2, 1]]}}, [[1.0, 2.0], [3.0, 4.0]]),
        ({"tensors": {}, "arrays": {"a": ["O", [2]]}}, [[1.0, 2.0], [3.0, 4.0]]),
        ({"meta_info": [1]}, [[1.0, 2.0], [3.0, 4.0]]),
    ],
)
def test_a_file_whose_metadata_do_not_fit_its_columns_is_refused(changed: Any, rows: Any, tmp_path: Path) -> None:
    about = {"format": 1, "tensors": {"a": ["float32", [2]]}, "arrays": {}, "json": [], "meta_info": {}, **changed}
    table = pa.table({"a": rows}).replace_schema_metadata({METADATA: json.dumps(about)})
    pq.write_table(table, tmp_path / "batch.parquet")
    with pytest.raises(DataError, match="cannot be read as a batch"):
        read_parquet(tmp_path / "batch.parquet")


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    with pytest.raises(DataError, match="cannot be read as a batch or as verl's tasks"):
        read_parquet(path)
    pq.write_table(pa.table({"question": ["a"]}), path)
    with pytest.raises(DataError, match="it has no column prompt, only question"):
        read_parquet(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be read as a batch"):
        read_parquet(path)
