"""Batches on disk: every plain value comes back as it was, and a file of another kind is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from asyncrl.compat.verl import DataProto
from asyncrl.compat.verl.batches.merging import equal
from asyncrl.errors import DataError, DataProtoError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    """Equal in type and value all the way down; nan equals nan."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[name], right[name]) for name in left)
    return equal(left, right)


def test_a_batch_comes_back_as_it_was(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "half": torch.tensor([1.5, -2.0, float("inf")], dtype=torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "part": whole[:, 1:3],
        "repeated": whole[:1].expand(3, 4),
        "again": whole[:, 1:3],
    }
    arrays = {
        "uid": np.array(["a", "b", "c"]),
        "extra_info": np.array([{"index": 1}, {"image": np.arange(3)}, None], dtype=object),
        "score": np.array([0.5, np.nan, 1], dtype=np.float32),
    }
    about = {"temperature": 0.7, "eos": (1, 2), "metrics": {"loss": [np.float32(0.25)]}, 3: torch.arange(2)}
    data = DataProto.from_dict(tensors, arrays, about)  # type: ignore[arg-type]
    data.save_to_disk(tmp_path / "batch.safetensors")
    found = DataProto.load_from_disk(tmp_path / "batch.safetensors")

    assert list(found.batch.keys()) == list(tensors)
    assert all(torch.equal(found.batch[name], tensor) for name, tensor in tensors.items())
    assert found.batch["half"].dtype == torch.bfloat16
    assert equal(found.non_tensor_batch["score"], arrays["score"])
    assert equal(found.non_tensor_batch["uid"], arrays["uid"])
    assert found.non_tensor_batch["extra_info"][0] == {"index": 1}
    assert equal(found.non_tensor_batch["extra_info"][1]["image"], np.arange(3))
    assert torch.equal(found.meta_info.pop(3), about.pop(3))  # type: ignore[call-overload]
    assert same(found.meta_info, about)
    assert [path.name for path in tmp_path.iterdir()] == ["batch.safetensors"]


@pytest.mark.slow
@given(PLAIN)
def test_every_plain_value_comes_back(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.mktemp("batch") / "batch"
    DataProto(meta_info={"value": value}).save_to_disk(path)
    found = DataProto.load_from_disk(path)
    assert found.batch is None
    assert same(found.meta_info, {"value": value})


def test_a_batch_without_tensors_or_without_rows_comes_back(tmp_path: Path) -> None:
    for data in (DataProto.from_dict({"x": torch.zeros(0, 3)}), DataProto.from_dict(non_tensors={"uid": ["a"]})):
        data.save_to_disk(tmp_path / "batch")
        assert len(DataProto.load_from_disk(tmp_path / "batch")) == len(data)


def test_what_is_no_plain_data_is_refused_by_name(tmp_path: Path) -> None:
    data = DataProto.from_dict(non_tensors={"uid": np.array([{"path": tmp_path}], dtype=object)})
    with pytest.raises(DataProtoError, match=r"non_tensor_batch\['uid'\]\[0\]\['path'\] is a PosixPath"):
        data.save_to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    (tmp_path / "batch").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match="verl's own files are pickles"):
        DataProto.load_from_disk(tmp_path / "batch")
    assert not ran.exists()


@pytest.mark.parametrize(
    "packed",
    [
        ["array", "|O", [1], b"12345678"],
        ["array", "<f8", [2], b"12345678"],
        ["array", "<f8", [-1], b"12345678"],
        ["map", ["a", ["array", "<U0", [1 << 45], b""]]],
        ["map", ["a", ["array", "<U1", [1], b"\xff\xff\xff\xff"]]],
        ["tensor", "load", [1], b"1234"],
        ["tensor", "float32", [2], b"1234"],
        ["objects", [2], [None]],
        ["map", [["list"], 1]],
        ["map", [1]],
        ["eval", "1"],
        [["list"]],
        [],
        3,
    ],
)
def test_a_forged_file_is_refused(packed: Any, tmp_path: Path) -> None:
    text = msgspec.msgpack.encode(
        {"format": 1, "rows": None, "names": [], "non_tensor_batch": ["map"], "meta_info": packed}
    )
    save_file({"about": torch.frombuffer(bytearray(text), dtype=torch.uint8)}, tmp_path / "batch")
    with pytest.raises(DataError, match="is not a whole batch of save_to_disk"):
        DataProto.load_from_disk(tmp_path / "batch")


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": -1},
        {"rows": [2, 3]},
        {"rows": 3, "names": ["x"]},
        {"rows": 2, "names": [1]},
        {"non_tensor_batch": ["map", ["a", ["list", 1, 2]]]},
        {"non_tensor_batch": ["map", ["a", ["scalar", "<f8", [], b"12345678"]]]},
        {"rows": 2, "non_tensor_batch": ["map", ["a", ["objects", [1], [None]]]]},
    ],
)
def test_a_forged_file_whose_parts_make_no_batch_is_refused(changed: Any, tmp_path: Path) -> None:
    parts = {"format": 1, "rows": None, "names": [], "non_tensor_batch": ["map"], "meta_info": ["map"], **changed}
    text = torch.frombuffer(bytearray(msgspec.msgpack.encode(parts)), dtype=torch.uint8)
    save_file({"about": text, "batch/x": torch.zeros(2)}, tmp_path / "batch")
    with pytest.raises(DataError, match="is not a whole batch of save_to_disk"):
        DataProto.load_from_disk(tmp_path / "batch")


def test_a_missing_or_cut_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    with pytest.raises(DataError, match=r"batch: the file does not exist$"):
        DataProto.load_from_disk(path)
    DataProto.from_dict({"x": torch.zeros(100)}).save_to_disk(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match="batch is not a whole batch"):
        DataProto.load_from_disk(path)
