"""Writes batches as Parquet files, and reads these files and verl's task files as batches.

A written file has a column for each field. A tensor becomes lists of numbers. Objects have Parquet's own types if that
keeps their values exactly, and are JSON text otherwise. The file's metadata has the form of each column.

The fields of a task have the layout of verl's task files, so that a batch's file is a task file as well: `raw_prompt`
is the column `prompt`, and `tools_kwargs` is within `extra_info`. In a column of structs, every row gets all fields,
and each field gets one type. If that changes a row's value, a further column has the exact values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.compat.verl.batches.fields import columns, objects, require
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.errors import DataError, DataProtoError, WireError
from asyncrl.machine.files import partial_name, sync
from asyncrl.msgpack_values import decoder, pack
from asyncrl.types import without_nulls

METADATA = b"asyncrl.dataproto"
FORMAT = 2
_TASK_COLUMNS = {"raw_prompt": "prompt", "reward_model": "reward_model", "extra_info": "extra_info"}
"""Fields that are stored as structs, each with its column. Parquet turns missing entries into null."""
_LEFT_OUT = ("extra_info", "tools_kwargs")
"""Fields that get no column if they are empty in all rows."""
_EXACT = {name: f"asyncrl.exact.{name}" for name in ("reward_model", "extra_info", "tools_kwargs")}
"""Fields that become structs, each with the column for its exact values as msgpack. A file has this column only if the
structs change a value."""
_NUMBERS = "biuf"
_OTHERS = "OUS"
"""The `dtype.kind` of arrays of objects and texts; that of arrays of numbers is in _NUMBERS."""
_VALUE = decoder(Any)


def write_parquet(data: DataProto, path: str | Path) -> None:
    """Write the file atomically.

    Raises DataProtoError: neither Parquet nor JSON can keep a value; `save_to_disk` may keep it. Raises OSError: the
    file cannot be written.
    """
    table: dict[str, pa.Array] = {}
    about: dict[str, Any] = {"format": FORMAT, "tensors": {}, "arrays": {}, "json": [], "rows": len(data)}
    about["left_out"] = [name for name in _LEFT_OUT if name in data.non_tensor_batch]
    about["others"] = {
        name: [array.dtype.str, list(array.shape[1:])]
        for name, array in data.non_tensor_batch.items()
        if array.dtype.kind in _OTHERS and (array.dtype != object or array.ndim > 1)
    }
    for name, tensor in ({} if data.batch is None else data.batch).items():
        table[name] = _lists(_numbers(name, tensor))
        about["tensors"][name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape[1:])]
    for name, array in _task_rows(data.non_tensor_batch).items():
        require(name not in table, f"{name!r} is a tensor and an array; a file has one column of that name")
        require(
            array.dtype.kind in _NUMBERS + _OTHERS,
            f"{name!r} is an array of {array.dtype}, which Parquet cannot keep; use save_to_disk",
        )
        if array.dtype.kind in _NUMBERS:
            table[name] = _lists(array)
            about["arrays"][name] = [str(array.dtype), list(array.shape[1:])]
        elif name in _TASK_COLUMNS.values():
            table[name] = _structs(name, array)
        else:
            table[name], is_json = _objects(name, array)
            about["json"] += [name] * is_json
    table |= _exact_columns(data.non_tensor_batch, table)
    about["meta_info"] = json.loads(_json("meta_info", data.meta_info))
    path = Path(path)
    partial = partial_name(path)
    written = pa.table(table).replace_schema_metadata({METADATA: json.dumps(about)})
    pq.write_table(written, partial, compression="zstd")
    sync(partial)
    partial.replace(path)


def read_parquet(path: str | Path) -> DataProto:
    """The batch in a file that `write_parquet` wrote, or in a task file in verl's layout.

    The batch of a task file has no tensors. It has every column as a field, with `prompt` renamed to `raw_prompt`, and
    `index`, `tools_kwargs` and `interaction_kwargs` from `extra_info`, as in verl's data set.

    Raises DataError: the file is neither.
    """
    try:
        table = pq.read_table(path)
        found = (table.schema.metadata or {}).get(METADATA)
        return _of_tasks(table) if found is None else _of_batch(table, json.loads(found))
    except (
        DataProtoError,
        OSError,
        pa.ArrowException,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        msgspec.MsgspecError,
    ) as error:
        raise DataError(f"{path} cannot be read as a batch or as verl's tasks: {error}") from error


def _of_batch(table: pa.Table, about: Mapping[str, Any]) -> DataProto:
    if about["format"] != FORMAT:
        raise ValueError(f"its format is {about['format']}, this asyncrl reads {FORMAT}")
    tensors, arrays = {}, {}
    for name, (kind, shape) in about["tensors"].items():
        dtype = getattr(torch, kind)
        tensors[name] = torch.from_numpy(_flat(table.column(name), shape).copy()).to(dtype)
    for name in table.column_names:
        if name in about["arrays"]:
            kind, shape = about["arrays"][name]
            if np.dtype(kind).kind not in _NUMBERS:
                raise ValueError(f"{name} has the type {kind}, which is not a type of numbers")
            arrays[name] = _flat(table.column(name), shape).astype(kind)
        elif name not in tensors and name not in _EXACT.values():
            values = table.column(name).to_pylist()
            arrays[name] = objects([json.loads(each) for each in values] if name in about["json"] else values)
    fields = {task: column for task, column in _TASK_COLUMNS.items() if column in arrays}
    for task, column in fields.items():
        arrays[task] = arrays.pop(column)
    if "raw_prompt" in fields:
        arrays["raw_prompt"] = objects([without_nulls(each) for each in arrays["raw_prompt"]])
    for name, column in _EXACT.items():
        if column in table.column_names:
            arrays[name] = objects([_VALUE.decode(each) for each in table.column(column).to_pylist()])
    for name in about.get("left_out", ()):
        arrays.setdefault(name, objects([{} for _ in range(about["rows"])]))
    for name, (kind, shape) in about.get("others", {}).items():
        arrays[name] = _shaped(arrays[name], kind, shape)
    if not isinstance(about["meta_info"], dict):
        raise ValueError("its meta_info is not a mapping")
    return DataProto.from_dict(tensors, arrays, about["meta_info"])


def _of_tasks(table: pa.Table) -> DataProto:
    if "prompt" not in table.column_names:
        raise ValueError(f"it has no column prompt, only {', '.join(table.column_names)}")
    rows = []
    for number, row in enumerate(table.to_pylist()):
        extra = row.get("extra_info") or {}
        rows.append(
            {
                **{name: value for name, value in row.items() if name != "prompt"},
                "raw_prompt": without_nulls(row["prompt"]),
                "extra_info": extra,
                "index": number if extra.get("index") is None else extra["index"],
                "tools_kwargs": extra.get("tools_kwargs") or {},
                "interaction_kwargs": extra.get("interaction_kwargs") or {},
            }
        )
    return DataProto.from_dict(non_tensors=columns(rows))


def _task_rows(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The arrays, with task fields renamed to their columns and `tools_kwargs` moved into `extra_info`."""
    found = dict(arrays)
    for field, column in _TASK_COLUMNS.items():
        require(
            field == column or field not in found or column not in found,
            f"{field!r} goes into the column {column!r}, but an array has that name too: rename the array",
        )
    if "tools_kwargs" in found and "extra_info" in found:
        pairs = zip(found["extra_info"], found.pop("tools_kwargs"), strict=True)
        kept = [{**extra, "tools_kwargs": {**kwargs}} if kwargs else extra for extra, kwargs in pairs]
        found["extra_info"] = objects([{name: value for name, value in each.items() if value != {}} for each in kept])
    if "extra_info" in found and not any(found["extra_info"]):
        del found["extra_info"]  # Parquet cannot store structs without fields.
    return {_TASK_COLUMNS.get(name, name): array for name, array in found.items()}


def _exact_columns(arrays: Mapping[str, NDArray[Any]], table: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    """Columns with the exact values of the fields that the structs in `table` change.

    Raises DataProtoError: msgpack cannot encode a value.
    """
    found = {}
    for name, column in _EXACT.items():
        values = arrays[name].tolist() if name in arrays else []
        kept = table[name].to_pylist() if name in table else []
        if repr(kept) != repr(values):
            try:
                found[column] = pa.array([pack(value, name) for value in values], pa.binary())
            except WireError as error:
                raise DataProtoError(f"{error}; use save_to_disk") from error
    return found


def _numbers(name: str, tensor: Tensor) -> NDArray[Any]:
    """The tensor as an array that Parquet can store; half precision becomes float32.

    Raises DataProtoError: Parquet lacks the tensor's type.
    """
    require(not tensor.is_nested, f"{name!r} is a nested tensor, which Parquet cannot keep; use save_to_disk")
    halves = (torch.bfloat16, torch.float16)
    plain = tensor.detach().cpu()
    try:
        found: NDArray[Any] = (plain.float() if tensor.dtype in halves else plain).numpy()
    except TypeError:
        found = np.empty(0, object)
    require(found.dtype.kind in _NUMBERS, f"{name!r} has {tensor.dtype}, which Parquet lacks; use save_to_disk")
    return found


def _lists(array: NDArray[Any]) -> pa.Array:
    """An array [B, ...] as B lists of lists."""
    found = pa.array(array.reshape(-1))
    for dimension in range(array.ndim - 1, 0, -1):
        count, size = prod(array.shape[:dimension]), array.shape[dimension]
        found = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * size, found)
    return found


def _flat(column: pa.ChunkedArray, shape: Sequence[int]) -> NDArray[Any]:
    """B nested lists of numbers as an array [B, *shape]. Raises ValueError: a list has a wrong length or a null."""
    values = column.combine_chunks()
    for size in shape:
        if set(pc.list_value_length(values).to_pylist()) - {size}:
            raise ValueError(f"a list does not have {size} elements")
        values = values.flatten()
    if values.null_count:
        raise ValueError("a number is null")
    found: NDArray[Any] = values.to_numpy(zero_copy_only=False).reshape(len(column), *shape)
    return found


def _structs(name: str, array: NDArray[Any]) -> pa.Array:
    """The column of a task's field. Raises DataProtoError: the rows have no common type."""
    try:
        return pa.array(array.tolist())
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise DataProtoError(f"{name!r} has rows that do not go into one column: {error}; use save_to_disk") from error


def _shaped(values: NDArray[Any], kind: str, shape: Sequence[int]) -> NDArray[Any]:
    """B nested lists as an array [B, *shape] of objects or texts."""
    found = np.empty((len(values), *shape), kind)
    for index in np.ndindex(found.shape):
        each: Any = values
        for place in index:
            each = each[place]
        found[index] = each
    return found


def _objects(name: str, array: NDArray[Any]) -> tuple[pa.Array, bool]:
    """The column of an array of texts or objects, and True if the column is JSON text."""
    values = array.tolist()
    try:
        column = pa.array(values)
        # repr distinguishes 1, 1.0 and True, and is the same for two nans.
        if repr(column.to_pylist()) == repr(values) and _writable(column.type):
            return column, False
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        pass  # Values of several types, for example, are stored as JSON.
    return pa.array([_json(name, value) for value in values], pa.string()), True


def _writable(kind: pa.DataType) -> bool:
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return (bool(inner) or not pa.types.is_struct(kind)) and all(map(_writable, inner))


def _json(name: str, value: Any) -> str:
    try:
        text = json.dumps(value)
        if repr(json.loads(text)) == repr(value):
            return text
    except (TypeError, ValueError):
        pass
    raise DataProtoError(
        f"{name} has a value that neither Parquet nor JSON keeps exactly: {value!r:.100}; use save_to_disk"
    )
