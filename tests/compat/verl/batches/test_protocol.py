"""DataProto by itself: what differs from verl, errors, and numbers worked by hand. test_against_verl has the rest."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.compat.verl import (
    DataProto,
    TensorBatch,
    compute_position_id_with_mask,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from asyncrl.errors import AsyncrlError, DataProtoError


def make_batch(rows: int = 4, **meta_info: Any) -> DataProto:
    numbers = np.arange(rows)
    return DataProto.from_dict(
        {"ids": torch.arange(rows * 2).reshape(rows, 2)}, {"uid": numbers.astype(str).astype(object)}, meta_info
    )


def ids(data: DataProto) -> list[int]:
    """The first token of each row."""
    found: list[int] = data.batch["ids"][:, 0].tolist()
    return found


def test_fields_are_reached_as_in_verl() -> None:
    data = DataProto.from_single_dict({"ids": torch.zeros(3, 2), "uid": np.array(["a", "b", "c"], object)}, {"t": 1})
    assert len(data) == 3
    assert list(data.batch.keys()) == ["ids"]
    assert "ids" in data.batch.keys()  # noqa: SIM118
    assert data.batch.batch_size == torch.Size([3])
    assert data.batch.batch_size[0] == 3
    assert data.batch["ids"].shape == (3, 2)
    assert data.non_tensor_batch["uid"].tolist() == ["a", "b", "c"]
    assert data.meta_info == {"t": 1}


def test_a_row_has_no_batch_dimension() -> None:
    row = make_batch(temperature=0.5)[1]
    assert row.batch["ids"].tolist() == [2, 3]
    assert row.batch.batch_size == ()
    assert (row.non_tensor_batch, row.meta_info) == ({"uid": "1"}, {"temperature": 0.5})


def test_a_loop_over_a_batch_gives_its_rows() -> None:
    assert [row.batch["ids"][0].item() for row in make_batch(3)] == [0, 2, 4]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), [2, 4]),
        (slice(None, None, 2), [0, 4]),
        ([3, -1, 0], [6, 6, 0]),
        (np.array([2, 1]), [4, 2]),
        (torch.tensor([2, 1], dtype=torch.int32), [4, 2]),
        ([True, False, False, True], [0, 6]),
        (np.array([False, True, False, False]), [2]),
        (np.array([False, False, False, True])[::-1], [0]),
        (torch.tensor([False, False, False, False]), []),
    ],
)
def test_rows_are_chosen_by_slices_lists_and_masks(index: Any, expected: list[int]) -> None:
    chosen = make_batch()[index]
    assert ids(chosen) == expected
    assert [int(each) * 2 for each in chosen.non_tensor_batch["uid"]] == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("held", ["cpu", "cuda"])
@pytest.mark.parametrize("index", [[3, 1], [False, True, False, True]])
def test_an_index_on_another_device_chooses_rows_of_plain_and_of_nested_tensors(held: str, index: list[Any]) -> None:
    ragged = torch.nested.nested_tensor([torch.full((row + 1,), row) for row in range(4)], layout=torch.jagged)
    data = DataProto.from_dict({"ids": torch.arange(8).reshape(4, 2), "ragged": ragged}).to(held)
    for device in ("cpu", "cuda"):
        key = torch.tensor(index, device=device)
        expected = torch.arange(4)[key.cpu()].tolist()
        for chosen in (data[key].batch, data.batch[key]):
            assert chosen["ids"][:, 0].tolist() == [row * 2 for row in expected]
            assert [row[0].item() for row in chosen["ragged"].unbind()] == expected
            assert chosen["ragged"].device.type == chosen["ids"].device.type == held


def test_repeats_are_interleaved_or_not() -> None:
    assert ids(make_batch(2).repeat(2, interleave=True)) == [0, 0, 2, 2]
    assert ids(make_batch(2).repeat(2, interleave=False)) == [0, 2, 0, 2]
    assert ids(make_batch(2).sample_level_repeat([2, 1])) == [0, 0, 2]
    without_tensors = DataProto(None, {"u": np.array(["a"], dtype=object)})
    for batch, kind in ((make_batch(1), RuntimeError), (without_tensors, ValueError)):
        for repeat in (lambda batch=batch: batch.repeat(-1), lambda batch=batch: batch.sample_level_repeat([-1])):
            with pytest.raises(kind, match="a row cannot be repeated -1 times"):
                repeat()


def test_padding_repeats_the_first_rows_as_often_as_needed_and_goes_back() -> None:
    data = make_batch(3)
    padded, added = pad_dataproto_to_divisor(data, 8)
    assert (added, ids(padded)) == (5, [0, 2, 4, 0, 2, 4, 0, 2])
    assert ids(unpad_dataproto(padded, added)) == ids(data)
    assert pad_dataproto_to_divisor(data, 3) == (data, 0)
    assert unpad_dataproto(data, 0) is data


def test_positions_count_tokens_from_the_first_that_is_no_padding() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    assert compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 2, 3, 4, 5]]


def test_chunks_are_equal_or_refused_unless_padding_is_enabled() -> None:
    assert [ids(each) for each in make_batch(4).chunk(2)] == [[0, 2], [4, 6]]
    with pytest.raises(AssertionError, match="4 rows do not divide into 3 equal chunks"):
        make_batch(4).chunk(3)
    for count, kind in ((0, ZeroDivisionError), (-1, ValueError)):
        with pytest.raises(kind, match=f"cannot be divided into {count} chunks"):
            make_batch(4).chunk(count)
    uneven = DataProto.from_dict({"ids": torch.arange(10).reshape(5, 2)}, auto_padding=True)
    assert [len(each) for each in uneven.chunk(3)] == [2, 2, 1]


def test_metrics_of_workers_are_collected_and_other_information_must_be_equal() -> None:
    parts = [make_batch(1, step=3, metrics={"loss": value}) for value in (0.5, 0.25)]
    assert DataProto.concat(parts).meta_info == {"step": 3, "metrics": {"loss": [0.5, 0.25]}}
    with pytest.raises(AssertionError, match=r"meta_info\['step'\] differs"):
        DataProto.concat([make_batch(1, step=3), make_batch(1, step=4)])


def test_batches_to_be_joined_need_the_same_fields() -> None:
    other = DataProto.from_dict({"values": torch.zeros(4)}, {"uid": np.zeros(4)})
    with pytest.raises(DataProtoError, match="have different tensors: ids and values"):
        DataProto.concat([make_batch(), other])


@pytest.mark.parametrize(
    ("tensors", "arrays", "problem"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, None, r"'a' has \[2\], 'b' has \[3\]"),
        ({"a": torch.zeros(2)}, {"uid": [1, 2, 3]}, "'uid'.* has 3 rows; the tensors have 2"),
        ({"a": torch.tensor(1.0)}, None, r"batch size \[\], not \[B\]"),
        ({}, {"uid": np.array(3)}, "'uid'.* has no rows"),
    ],
)
def test_lengths_must_agree(tensors: Any, arrays: Any, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem) as caught:
        DataProto.from_dict(tensors, arrays)
    assert isinstance(caught.value, AsyncrlError)


def test_names_are_swapped_and_shifted_at_once_and_a_missing_one_changes_nothing() -> None:
    batch = DataProto.from_dict({"a": torch.zeros(2), "b": torch.ones(2)})
    batch.rename(["a", "b"], ["b", "a"])
    assert {name: tensor.tolist() for name, tensor in batch.batch.items()} == {"a": [1, 1], "b": [0, 0]}
    batch.rename(["a", "b"], ["b", "c"])
    assert {name: tensor.tolist() for name, tensor in batch.batch.items()} == {"b": [1, 1], "c": [0, 0]}
    with pytest.raises(KeyError, match="zz"):
        batch.rename(["b", "zz"], ["d", "e"])
    assert set(batch.batch.keys()) == {"b", "c"}


def test_a_field_that_does_not_fit_is_refused_when_it_is_set() -> None:
    data = make_batch()
    with pytest.raises(RuntimeError, match=r"shape \[3\], which does not begin with the batch size \[4\]"):
        data.batch["values"] = torch.zeros(3)
    with pytest.raises(DataProtoError, match=r"'values' is a nested tensor of layout torch\.strided"):
        data.batch["values"] = torch.nested.as_nested_tensor([torch.zeros(1)] * 4)
    with pytest.raises(ValueError, match="'x' is a list"):
        DataProto.from_single_dict({"x": [1, 2]})  # type: ignore[dict-item]


def test_what_cannot_be_done_changes_nothing() -> None:
    data, other = make_batch(step=1), make_batch(step=2)
    other.batch["values"] = torch.zeros(4)
    before = copy.deepcopy(data)
    with pytest.raises(AssertionError, match="meta_info"):
        data.union(other)
    with pytest.raises(AssertionError, match=r"meta_info has no \['x'\]; it has step"):
        data.pop(["ids"], ["uid"], ["x"])
    with pytest.raises(AssertionError, match="non_tensor_batch: a name is given twice"):
        data.pop(["ids"], ["uid", "uid"])
    assert (data.batch.keys(), data.meta_info) == (before.batch.keys(), before.meta_info)
    assert data.non_tensor_batch.keys() == before.non_tensor_batch.keys()


def test_a_union_adds_fields_and_takes_equal_ones() -> None:
    data, other = make_batch(), make_batch(step=2)
    other.batch["values"] = torch.full((4,), 2.0)
    other.non_tensor_batch["score"] = np.array([0.0, float("nan"), 1.0, 1.0])
    united = data.union(other).union(other)
    assert united is data
    assert list(data.batch.keys()) == ["ids", "values"]
    assert (list(data.non_tensor_batch), data.meta_info) == (["uid", "score"], {"step": 2})


def test_a_shuffled_iterator_repeats_with_its_seed() -> None:
    data = make_batch(6, step=1)

    def order(seed: int) -> list[int]:
        parts = list(data.make_iterator(2, epochs=2, seed=seed, dataloader_kwargs={"shuffle": True}))
        assert [len(part) for part in parts] == [2] * 6
        assert parts[0].meta_info is data.meta_info
        return [first for part in parts for first in ids(part)]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)[:6]) == ids(data)
    with pytest.raises(AssertionError, match="6 rows do not divide into mini-batches of 4"):
        data.make_iterator(4, epochs=1)


def test_columns_unfold_into_rows() -> None:
    pairs = DataProto.from_dict({"ids": torch.arange(8).reshape(2, 4), "len": torch.tensor([3, 4])})
    unfolded = pairs.unfold_column_chunks(2, ["ids"])
    assert unfolded.batch["ids"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unfolded.batch["len"].tolist() == [3, 3, 4, 4]


def test_a_batch_may_be_given_as_any_mapping_of_tensors() -> None:
    class TensorDictLike(dict[str, torch.Tensor]):
        batch_size = torch.Size([2])
        device = None

    assert len(DataProto(batch=TensorDictLike(x=torch.zeros(2, 1)))) == 2
    assert len(DataProto(batch={"x": torch.zeros(2, 1)})) == 2


def test_torch_joins_and_stacks_tensor_batches() -> None:
    batch = TensorBatch({"x": torch.tensor([[1], [2]])})
    assert torch.cat([batch, batch])["x"][:, 0].tolist() == [1, 2, 1, 2]  # type: ignore[call-overload]
    assert torch.stack(list(batch), dim=0)["x"].tolist() == [[1], [2]]  # type: ignore[arg-type,call-overload]
    with pytest.raises(TypeError):
        torch.cat([batch, batch], dim=1)  # type: ignore[call-overload]


def test_information_about_a_batch_is_a_line_a_field() -> None:
    assert make_batch(2, step=1).get_data_info().splitlines() == [
        "batch",
        "  ids: (2, 2) (torch.int64) cpu",
        "non_tensor_batch",
        "  uid: ndarray(2,) (object)",
        "meta_info",
        "  step: int",
    ]


def test_a_batch_without_rows_keeps_its_fields() -> None:
    empty = make_batch(2)[0:0]
    again = DataProto.from_dict(empty.batch, empty.non_tensor_batch)
    assert (len(again), again.batch["ids"].shape) == (0, (0, 2))
    assert "ids: (0, 2)" in again.get_data_info()
    assert ids(DataProto.concat([again, make_batch(1)])) == [0]


def test_equal_values_within_lists_and_mappings_are_united_and_joined() -> None:
    def batch() -> DataProto:
        pixels = np.array(
            [{"pixels": np.ones(2), "score": float("nan")}, [np.float32("nan"), torch.ones(2)]], dtype=object
        )
        return DataProto.from_dict({"a": torch.zeros(2)}, {"extra": pixels}, meta_info={"mean": np.ones(2)})

    assert set(batch().union(batch()).non_tensor_batch) == {"extra"}
    assert len(DataProto.concat([batch(), batch()])) == 4
    infos = {"a": float("nan"), "b": 1}, {"a": float("nan"), "b": np.float64(1.0)}
    first, second = (DataProto(meta_info={"t": info}) for info in infos)
    assert first.union(second).meta_info["t"]["b"] == 1
    other = batch()
    other.non_tensor_batch["extra"][0]["pixels"] = np.zeros(2)
    with pytest.raises(DataProtoError, match=r"non_tensor_batch\['extra'\] differs"):
        batch().union(other)
