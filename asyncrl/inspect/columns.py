"""The Parquet columns of an exported run, derived from the fields of `types` and of the store's records.

An exported run is a folder of three files: one row for each trajectory, batch plan and dead letter. docs/replay.md
lists the columns. They are the same for every run of this format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from asyncrl.replay.records import DeadLetter, TrajectoryRecord
from asyncrl.replay.stored import StoredTrajectory
from asyncrl.types import BatchPlan, Labels, Trajectory, runs_of

FORMAT = 2


class Column(NamedTuple):
    """How values of one type are kept: the type in the file, and the two conversions."""

    type: pa.DataType
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    is_array: bool = False


Columns = Mapping[str, Column]


def column_of(kind: Any) -> Column:
    """The column for values of a Python type, as it is annotated."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is np.ndarray:
        dtype = np.dtype(get_args(inner[1])[0])
        return Column(pa.list_(pa.from_numpy_dtype(dtype)), _as_it_is, partial(_array, dtype=dtype), is_array=True)
    if origin is Mapping and inner[1] is float:
        return Column(pa.map_(pa.string(), pa.float64()), lambda values: list(values.items()), dict)
    if origin is Mapping:
        # A struct has all fields of its column, and the arguments of tools differ: hence JSON text.
        return Column(pa.string(), json.dumps, json.loads)
    if origin in (tuple, Sequence):
        part, made = column_of(inner[0]), tuple if origin is tuple else list
        return Column(
            pa.list_(part.type), lambda values: [*map(part.write, values)], lambda row: made(map(part.read, row))
        )
    if issubclass(kind, StrEnum):
        return Column(pa.string(), str, kind)
    if issubclass(kind, tuple):
        parts = columns_of(kind)
        struct = pa.struct({name: column.type for name, column in parts.items()})
        return Column(struct, partial(row_of, parts), lambda row: kind(**values_of(parts, row)))
    return Column(_SCALARS[kind], _as_it_is, _as_it_is)


_SCALARS = {str: pa.string(), int: pa.int32(), float: pa.float64(), bool: pa.bool_()}


def _as_it_is(value: Any) -> Any:
    return value


def _array(values: pa.Array, dtype: np.dtype[Any]) -> NDArray[Any]:
    found: NDArray[Any] = values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    return found


def columns_of(noun: type, but: Sequence[str] = ()) -> dict[str, Column]:
    """A column for each field of a data type, except those in `but`."""
    return {name: column_of(kind) for name, kind in get_type_hints(noun).items() if name not in but}


def row_of(columns: Columns, noun: Any) -> dict[str, Any]:
    return {name: column.write(getattr(noun, name)) for name, column in columns.items()}


def values_of(columns: Columns, row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: column.read(row[name]) for name, column in columns.items()}


def schema_of(*parts: Columns) -> pa.Schema:
    return pa.schema({name: column.type for columns in parts for name, column in columns.items()})


_TRAJECTORY = columns_of(Trajectory, but=["version_runs"])
_BY_TOKEN = {"loss_mask": column_of(NDArray[np.bool_]), "versions": column_of(NDArray[np.int32])}
_LABELS = columns_of(Labels, but=["trajectory_id"])
_IN_TRAJECTORY = ("group", "member", "tokens", "sampled", "reward", "outcome")
_RECORD = columns_of(TrajectoryRecord, but=["table", "leased", *_IN_TRAJECTORY])
PLAN = columns_of(BatchPlan)
DEAD_LETTER = columns_of(DeadLetter, but=["table", "order", "size"])

TRAJECTORIES = schema_of(_TRAJECTORY, _BY_TOKEN, _LABELS, _RECORD)
PLANS = schema_of(PLAN)
DEAD_LETTERS = schema_of({"id": column_of(str)}, DEAD_LETTER)
_ARRAYS = [name for each in (_TRAJECTORY, _BY_TOKEN, _LABELS) for name, column in each.items() if column.is_array]


def trajectory_batch(stored: Sequence[StoredTrajectory]) -> pa.RecordBatch:
    """Rows of `TRAJECTORIES` for trajectories whose data is there. Columns of labels are null where there are none."""
    rows = [
        {
            **row_of(_TRAJECTORY, each.trajectory),
            **row_of(_BY_TOKEN, each.trajectory),
            **(dict.fromkeys(_LABELS) if each.labels is None else row_of(_LABELS, each.labels)),
            **row_of(_RECORD, each.facts),
        }
        for each in stored
    ]
    return pa.RecordBatch.from_arrays(
        [pa.array([row[field.name] for row in rows], field.type) for field in TRAJECTORIES], schema=TRAJECTORIES
    )


def read_trajectories(batch: pa.RecordBatch) -> list[StoredTrajectory]:
    """The trajectories in a batch of `TRAJECTORIES`. Raises InvariantError or ValueError: they are not valid."""
    # Arrays are read from their columns: as Python lists they would take a hundred times longer.
    rows = batch.drop_columns(_ARRAYS).to_pylist()
    for name in _ARRAYS:
        column = batch.column(name)
        for index, row in enumerate(rows):
            row[name] = column[index].values
    return [_stored(row) for row in rows]


def _stored(row: Mapping[str, Any]) -> StoredTrajectory:
    runs = runs_of(_BY_TOKEN["versions"].read(row["versions"]))
    trajectory = Trajectory(**values_of(_TRAJECTORY, row), version_runs=runs)
    labels = None if row["reward"] is None else Labels(trajectory.id, **values_of(_LABELS, row))
    facts = TrajectoryRecord(
        trajectory.group_id,
        trajectory.member,
        len(trajectory),
        trajectory.sampled_tokens,
        **values_of(_RECORD, row),
        reward=labels.reward if labels else 0.0,
        outcome=labels.outcome if labels else 0.0,
    )
    return StoredTrajectory(facts, trajectory, labels, None)
