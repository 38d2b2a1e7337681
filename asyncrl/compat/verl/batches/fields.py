"""Functions over the fields of a batch: checks, conversion of lists to arrays, a description as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Size, Tensor

from asyncrl.compat.verl.batches.tensors import HasTensors, TensorBatch
from asyncrl.errors import DataProtoError

Array = np.ndarray[Any, Any]
UNSAMPLED = 0.0
"""The log-prob and score of tokens that the policy did not sample."""


def require(condition: bool, message: str) -> None:
    """Raises DataProtoError with `message` unless the condition holds."""
    if not condition:
        raise DataProtoError(message)


def objects(values: Sequence[Any]) -> Array:
    """An array [B] of objects, even if the values are lists or arrays of equal length."""
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """The values of B rows as one array [B] of objects for each name."""
    found: dict[str, Array] = {}
    for name in rows[0] if rows else ():
        found[name] = objects([values[name] for values in rows])
    return found


def check_rows(batch: TensorBatch | None, arrays: Mapping[str, Array]) -> None:
    """Raises DataProtoError: an array has another number of rows than the tensors, or a value in `arrays` is not an
    array [B, ...]. Without tensors, the lengths of the arrays are not compared."""
    if batch is not None:
        require(len(batch.batch_size) == 1, f"the batch has batch size {list(batch.batch_size)}, not [B]")
    for name, array in arrays.items():
        require(isinstance(array, np.ndarray), f"non_tensor_batch[{name!r}] is a {type(array).__name__}, not an array")
        require(array.ndim > 0, f"non_tensor_batch[{name!r}] has no rows")
        if batch is not None:
            require(
                len(array) == len(batch),
                f"non_tensor_batch[{name!r}] has {len(array)} rows; the tensors have {len(batch)}",
            )


def shared_size(tensors: Mapping[str, Tensor], dimensions: int) -> Size:
    """The sizes of the first `dimensions` dimensions, equal in all tensors. Raises DataProtoError: they differ."""
    sizes = {name: tensor.shape[:dimensions] for name, tensor in tensors.items()}
    first = next(iter(sizes))
    for name, size in sizes.items():
        require(
            size == sizes[first],
            f"tensors differ in their first {dimensions} dimensions: {first!r} has {list(sizes[first])}, "
            f"{name!r} has {list(size)}",
        )
    return sizes[first]


def description(tensors: HasTensors, arrays: Mapping[str, Array], meta_info: Mapping[str, Any]) -> str:
    """The names, shapes and types of all fields, with a line for each field."""
    lines = ["batch"]
    lines += [f"  {name}: {tuple(each.shape)} ({each.dtype}) {each.device}" for name, each in tensors.items()]
    lines += ["non_tensor_batch"]
    lines += [f"  {name}: ndarray{each.shape} ({each.dtype})" for name, each in arrays.items()]
    lines += ["meta_info", *(f"  {name}: {type(value).__name__}" for name, value in meta_info.items())]
    return "\n".join(lines)


def memory(tensors: HasTensors, arrays: Mapping[str, Array]) -> str:
    """The memory that the fields take, as text."""
    in_tensors = sum(each.element_size() * each.numel() for _, each in tensors.items())
    in_arrays = sum(each.nbytes for each in arrays.values())
    return f"tensors take {in_tensors / 2**30:.6f} GiB, arrays {in_arrays / 2**30:.6f} GiB"
