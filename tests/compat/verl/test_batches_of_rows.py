"""Nested tensors, and the functions that make batches of rows. test_against_verl compares them with verl's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from asyncrl.compat.verl import (
    DataProto,
    DataProtoConfig,
    all_gather_data_proto,
    collate_fn,
    fold_batch_dim,
    unfold_batch_dim,
    union_tensor_dict,
    write_parquet,
)
from asyncrl.compat.verl.controller.remote import compact
from asyncrl.errors import ConfigError, DataError, DataProtoError

ROWS = [[1], [2, 2], [], [4, 4, 4]]


def nested(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=torch.int64) for row in rows], layout=torch.jagged)


def wide(lengths: Sequence[int]) -> torch.Tensor:
    """A nested tensor [B, 2, j], whose rows differ in their last dimension."""
    values = torch.arange(2 * sum(lengths)).reshape(2, -1)
    ends = torch.tensor([0, *np.cumsum(lengths)])
    found: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, ends, jagged_dim=2)
    return found


def batch(rows: Sequence[Sequence[int]] = ROWS) -> DataProto:
    return DataProto.from_dict({"ids": nested(rows), "n": torch.arange(len(rows))}, {"uid": np.arange(len(rows))})


def ids(data: DataProto) -> list[list[int]]:
    return [row.tolist() for row in data.batch["ids"].unbind()]


@pytest.mark.parametrize(
    "choose",
    [
        lambda data: data[1:3],
        lambda data: data[::2],
        lambda data: data[[3, 0, 3, -2]],
        lambda data: data[torch.tensor([True, False, False, True])],
        lambda data: data[[]],
        lambda data: data.repeat(2),
        lambda data: data.repeat(2, interleave=False),
        lambda data: data.sample_level_repeat([0, 2, 1, 1]),
        lambda data: data.chunk(2)[1],
        lambda data: DataProto.concat([data, data[:1]]),
        lambda data: DataProto.concat([data[:0], data]),
        lambda data: data.to("cpu").select(["ids", "n"]),
        lambda data: compact(data[2:]),
    ],
)
def test_rows_of_a_nested_tensor_go_where_the_rows_of_other_tensors_go(
    choose: Callable[[DataProto], DataProto],
) -> None:
    chosen = choose(batch())
    assert ids(chosen) == [ROWS[row] for row in chosen.batch["n"].tolist()]
    assert chosen.non_tensor_batch["uid"].tolist() == chosen.batch["n"].tolist()


def test_rows_may_differ_in_a_later_dimension() -> None:
    data = DataProto.from_dict({"positions": wide([1, 3, 2])})
    joined = DataProto.concat([data[[2, 0]], data[1:2]])
    assert [row.tolist() for row in joined.batch["positions"].unbind()] == [
        [[4, 5], [10, 11]],
        [[0], [6]],
        [[1, 2, 3], [7, 8, 9]],
    ]


def test_a_row_of_a_nested_tensor_is_a_tensor() -> None:
    assert batch()[1].batch["ids"].tolist() == [2, 2]


def test_nested_tensors_unite_if_their_rows_are_equal() -> None:
    assert ids(batch().union(batch())) == ROWS
    for other in ([[1], [2, 2], [], [4, 4, 5]], [[1], [2, 2], [4, 4, 4], []]):
        with pytest.raises(DataProtoError, match=r"batch\['ids'\] differs"):
            batch().union(batch(other))
    with pytest.raises(DataProtoError, match=r"batch\['ids'\] differs"):
        batch().union(DataProto.from_dict({"ids": torch.zeros(4, 1)}))


def test_nested_and_other_tensors_cannot_be_joined() -> None:
    other = DataProto.from_dict(
        {"ids": torch.zeros(1, 3, dtype=torch.int64), "n": torch.zeros(1)}, {"uid": np.zeros(1)}
    )
    with pytest.raises(DataProtoError, match="'ids' as different kinds of tensors: nested in dimension 1, not nested"):
        DataProto.concat([batch(), other])


def test_nested_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    data = batch()[1:]
    data.batch["positions"] = wide([2, 0, 1])
    data.batch["half"] = torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16)
    data.save_to_disk(tmp_path / "batch")
    found = DataProto.load_from_disk(tmp_path / "batch")
    assert list(found.batch.keys()) == ["ids", "n", "positions", "half"]
    assert ids(found) == ROWS[1:]
    assert [row.tolist() for row in found.batch["positions"].unbind()] == [[[0, 1], [3, 4]], [[], []], [[2], [5]]]
    with pytest.raises(DataProtoError, match="'ids' is a nested tensor, which Parquet cannot keep; use save_to_disk"):
        write_parquet(data, tmp_path / "batch.parquet")


@pytest.mark.parametrize(
    ("offsets", "dimension"), [([0, 2, 9], 1), ([0, 3, 2, 5], 1), ([1, 5], 1), ([], 1), ([0, 5], 2), ([0, 5], 0)]
)
def test_a_damaged_nested_tensor_is_refused(tmp_path: Path, offsets: list[int], dimension: int) -> None:
    batch().save_to_disk(tmp_path / "batch")
    tensors = load_file(tmp_path / "batch")
    about = msgspec.msgpack.decode(tensors["about"].numpy().tobytes())
    about |= {"ragged": {"ids": dimension}, "names": ["ids"], "rows": max(0, len(offsets) - 1)}
    about["non_tensor_batch"] = ["map"]
    text = torch.frombuffer(bytearray(msgspec.msgpack.encode(about)), dtype=torch.uint8)
    damaged = {"batch/ids": torch.zeros(5), "offsets/ids": torch.tensor(offsets, dtype=torch.int64), "about": text}
    save_file(damaged, tmp_path / "damaged")
    with pytest.raises(DataError, match="do not divide into rows"):
        DataProto.load_from_disk(tmp_path / "damaged")


def test_single_rows_become_a_batch_again() -> None:
    data = DataProto.from_dict({"x": torch.arange(6).reshape(3, 2)}, {"uid": ["a", "b", "c"]}, {"t": 1})
    again = collate_fn([data[2], data[0]])
    assert again.batch["x"].tolist() == [[4, 5], [0, 1]]
    assert (again.non_tensor_batch["uid"].tolist(), again.meta_info) == (["c", "a"], {})
    assert collate_fn([DataProto.from_dict(non_tensors={"uid": ["a"]})[0]]).batch is None


def test_rows_fold_into_groups_and_unfold_again() -> None:
    data = DataProto.from_dict({"x": torch.arange(8).reshape(4, 2)}, {"uid": np.array(["a", "a", "b", "b"])}, {"t": 1})
    folded = fold_batch_dim(data, 2)
    assert folded.batch["x"].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert folded.non_tensor_batch["uid"].tolist() == [["a", "a"], ["b", "b"]]
    assert (len(folded), folded.meta_info) == (2, {"t": 1})
    again = unfold_batch_dim(folded)
    assert again.batch["x"].tolist() == data.batch["x"].tolist()
    assert again.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()
    assert data.non_tensor_batch["uid"].shape == (4,)
    with pytest.raises(DataProtoError, match="4 rows do not divide into 3 equal groups"):
        fold_batch_dim(data, 3)
    with pytest.raises(DataProtoError, match="the batch has no tensors"):
        unfold_batch_dim(DataProto())


def test_nested_tensors_do_not_fold_and_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"\['ids'\] have rows of different lengths, .*: pad them"):
        fold_batch_dim(batch(), 2)
    for same in (unfold_batch_dim(batch()), unfold_batch_dim(batch(), 1)):
        assert [row.tolist() for row in same.batch["ids"].unbind()] == ROWS


def test_tensors_of_two_batches_unite_in_the_first() -> None:
    first, second = (DataProto.from_dict({name: torch.arange(2)}).batch for name in "ab")
    assert union_tensor_dict(first, second) is first
    assert sorted(first.keys()) == ["a", "b"]


@pytest.mark.parametrize("by", ["setting", "true", "1"])
def test_automatic_padding_holds_for_all_batches_of_the_process(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    data = DataProto.from_dict({"x": torch.arange(5)})
    assert not data.is_padding_enabled()
    if by == "setting":
        monkeypatch.setattr(type(DataProtoConfig), "_enabled", False)
        DataProtoConfig.auto_padding = True
    else:
        monkeypatch.setenv("VERL_AUTO_PADDING", by)
    assert [len(each) for each in data.chunk(3)] == [2, 2, 1]
    DataProtoConfig.auto_padding = False
    with pytest.raises(AssertionError, match="auto_padding is 'yes'; it must be True or False"):
        DataProtoConfig.auto_padding = "yes"  # type: ignore[assignment]


class _Stack(list[Any]):
    @classmethod
    def from_list(cls, values: list[Any]) -> _Stack:
        return cls(values)


class _TensorDict(dict[str, Any]):
    def __init__(self, source: dict[str, Any], batch_size: list[int]) -> None:
        super().__init__(source)
        self.batch_size = batch_size


@pytest.fixture
def tensordict(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The part of the package tensordict that is used."""
    package: Any = ModuleType("tensordict")
    package.TensorDict, package.NonTensorStack = _TensorDict, _Stack
    package.NonTensorData = type("NonTensorData", (SimpleNamespace,), {"__init__": _keep})
    monkeypatch.setitem(sys.modules, "tensordict", package)
    return package


def _keep(self: Any, data: Any) -> None:
    self.data = data


def test_a_batch_becomes_a_tensordict_and_a_batch_again(tensordict: Any) -> None:
    data = DataProto.from_dict({"x": torch.arange(2)}, {"uid": ["a", "b"]}, {"t": [1, 2]})
    found = data.to_tensordict()
    assert isinstance(found, _TensorDict)
    assert (found.batch_size, sorted(found)) == ([2], ["t", "uid", "x"])
    again = DataProto.from_tensordict(found, {"step": 3})
    assert again.batch["x"].tolist() == [0, 1]
    assert again.non_tensor_batch["uid"].tolist() == ["a", "b"]
    assert again.meta_info == {"step": 3, "t": [1, 2]}
    assert DataProto(meta_info={"t": 1}).to_tensordict().batch_size == []
    with pytest.raises(DataProtoError, match=r"two parts of the batch have \['x'\]"):
        DataProto.from_dict({"x": torch.arange(2)}, meta_info={"x": 1}).to_tensordict()
    with pytest.raises(DataProtoError, match="num_batch_dims must be 1 if values are not tensors"):
        DataProto.from_tensordict(found, num_batch_dims=2)


def test_without_tensordict_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ConfigError, match=r"which is not installed: pip install 'tensordict>=0\.10', as verl does"):
        DataProto.from_dict({"x": torch.arange(2)}).to_tensordict()


class _Groups:
    """Groups of two processes, which are threads here."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=60)
        self._sent: dict[int, torch.Tensor] = {}

    def all_gather(self, received: list[torch.Tensor], tensor: torch.Tensor, group: int) -> None:
        self._sent[group] = tensor
        self._barrier.wait()
        for rank, each in enumerate(received):
            each.copy_(self._sent[rank])
        self._barrier.wait()


@pytest.fixture
def gather(monkeypatch: pytest.MonkeyPatch) -> Callable[[DataProto, DataProto], None]:
    """Gathers a batch of rank 0 and a batch of rank 1. Raises the error of rank 0."""

    def gather(first: DataProto, second: DataProto) -> None:
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
        monkeypatch.setattr(dist, "all_gather", _Groups().all_gather)
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(all_gather_data_proto, each, rank) for rank, each in enumerate((first, second))]
        calls[0].result()

    return gather


def test_every_process_gets_the_rows_of_all(gather: Any) -> None:
    given = [
        DataProto.from_dict({"x": torch.tensor([[rank, 1]])}, {"uid": [{"name": "ab"[rank] * 9**rank}]}, {"t": rank})
        for rank in range(2)
    ]
    gather(*given)
    for rank, data in enumerate(given):
        assert data.batch["x"].tolist() == [[0, 1], [1, 1]]
        assert data.non_tensor_batch["uid"].tolist() == [{"name": "a"}, {"name": "b" * 9}]
        assert data.meta_info == {"t": rank}


def test_batches_that_differ_are_not_gathered(gather: Any) -> None:
    one = DataProto.from_dict({"x": torch.zeros(1)})
    with pytest.raises(DataProtoError, match=r"the batch of rank 1 has \{'x': \['torch.float32', 2\]\}"):
        gather(one, DataProto.from_dict({"x": torch.zeros(2)}))
    with pytest.raises(DataProtoError, match=r"the nested tensors \['ids'\] cannot be gathered; pad them first"):
        all_gather_data_proto(batch(), None)
    with pytest.raises(DataProtoError, match="the batch has no tensors"):
        all_gather_data_proto(DataProto(), None)
