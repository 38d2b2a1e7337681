"""Makes the Parquet columns of an exported run from the fields of data types: those of `asyncrl.types`, the store's
records and the rows of `episodes`.

An exported run is a folder of tables: a row for each trajectory, step, batch plan and dead letter. docs/replay.md lists
the columns. They are the same in all exports with the same `FORMAT`. Values are numbers, texts, or lists of them, which
every reader of Parquet supports; a nested value is JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from asyncrl.replay.store.records import DeadLetter, TrajectoryRecord, TrajectoryState
from asyncrl.replay.stored import StoredTrajectory
from asyncrl.runs.decoding import Decode
from asyncrl.runs.inspect.episodes import EpisodeRow, StepRow, answer, prompt
from asyncrl.types import DIGEST_BYTES, NO_ROUTING, BatchPlan, Finish, Labels, Step, Trajectory, Turn, dtype_of, runs_of

FORMAT = 10


class Column(NamedTuple):
    """A kind of column: the type of its values in the file, and the conversions of values to this type and back."""

    type: pa.DataType
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    is_array: bool = False


Columns = Mapping[str, Column]


def column_of(kind: Any) -> Column:
    """The column for values of `kind`, a type annotation."""
    if (dtype := dtype_of(kind)) is not None:
        return Column(pa.list_(pa.from_numpy_dtype(dtype)), _as_it_is, partial(_array, dtype=dtype), is_array=True)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return column_of(inner[0])
    if origin is Mapping:
        return Column(pa.string(), json.dumps, _object)
    if origin is tuple and issubclass(inner[0], tuple):
        return Column(
            pa.string(),
            lambda values: json.dumps([each._asdict() for each in values]),
            lambda text: tuple(inner[0](**each) for each in json.loads(text)),
        )
    if origin is Sequence:
        return Column(pa.list_(column_of(inner[0]).type), list, list)
    if issubclass(kind, StrEnum):
        return Column(pa.string(), str, kind)
    return Column(_SCALARS[kind], _as_it_is, _as_it_is)


_SCALARS = {str: pa.string(), int: pa.int32(), float: pa.float64(), bool: pa.bool_()}


def _as_it_is(value: Any) -> Any:
    return value


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError: the text is not a JSON object."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text!r:.100} is not a JSON object")
    return found


def _array(values: pa.Array | None, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert a list of numbers. Raises ValueError: the list or one of its elements is null."""
    if values is None or values.null_count:
        raise ValueError("an array or one of its elements is missing")
    found: NDArray[Any] = values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    return found


def columns_of(noun: type, but: Sequence[str] = ()) -> dict[str, Column]:
    """A column for each field of a data type, except the fields in `but`."""
    return {name: column_of(kind) for name, kind in get_type_hints(noun).items() if name not in but}


def row_of(columns: Columns, noun: Any) -> dict[str, Any]:
    return {name: column.write(getattr(noun, name)) for name, column in columns.items()}


def values_of(columns: Columns, row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: column.read(row[name]) for name, column in columns.items()}


def schema_of(*parts: Columns) -> pa.Schema:
    return pa.schema({name: column.type for columns in parts for name, column in columns.items()})


def _parallel(field: str, noun: type) -> dict[str, Column]:
    """A column for each field of the type `noun`. A trajectory has a tuple `field` of such values, so each cell is a
    list."""

    def lists(name: str, column: Column) -> Column:
        return Column(
            pa.list_(column.type),
            lambda nouns: [column.write(getattr(each, name)) for each in nouns],
            lambda values: map(column.read, values),
        )

    return {f"{field}_{name}": lists(name, column) for name, column in columns_of(noun).items()}


_EPISODE = columns_of(EpisodeRow)
_TEXTS = {"prompt": column_of(str), "answer": column_of(str)}
_SPANS: Mapping[str, type] = {"turns": Turn, "steps": Step}
_IN_SPANS = {field: _parallel(field, noun) for field, noun in _SPANS.items()}
_TABLES = {name: column_of(get_type_hints(Trajectory)[name]) for name in ("image_spans", "image_digests")}
"""The arrays of a trajectory that have two dimensions. Each is written as one list, row after row."""
_ROUTING = {"routed_experts": column_of(NDArray[np.uint8])}
_TRAJECTORY = columns_of(
    Trajectory, but=["id", "group_id", "member", "finish", "tokens", "version_runs", *_ROUTING, *_TABLES, *_SPANS]
)
_BY_TOKEN = {"loss_mask": column_of(NDArray[np.bool_]), "versions": column_of(NDArray[np.int32])}
_TOKENS = {"token_ids": column_of(NDArray[np.int32])}
_LABELS = columns_of(Labels, but=["trajectory_id", "reward", "outcome"])
_IN_BOTH = tuple(_EPISODE.keys() & get_type_hints(TrajectoryRecord).keys() - {"state"})
_RECORD = columns_of(TrajectoryRecord, but=["table", "leased", "group", "state", "last_plan", *_IN_BOTH])
PLAN = columns_of(BatchPlan)
STEP = columns_of(StepRow)
DEAD_LETTER = columns_of(DeadLetter, but=["table", "order", "size"])

_DATA = (_TRAJECTORY, *_IN_SPANS.values(), _TOKENS, _BY_TOKEN, _ROUTING, _TABLES)
TRAJECTORIES = schema_of(_EPISODE, _RECORD, _TEXTS, *_DATA, _LABELS)
PLANS = schema_of(PLAN)
STEPS = schema_of(STEP)
DEAD_LETTERS = schema_of({"id": column_of(str)}, DEAD_LETTER)
_ARRAYS = [name for each in (*_DATA, _LABELS) for name, column in each.items() if column.is_array]


def trajectory_batch(stored: Sequence[StoredTrajectory], decode: Decode | None = None) -> pa.RecordBatch:
    """The rows of `TRAJECTORIES` for trajectories that have a record. Values that are not stored are null, and texts
    are null without `decode`."""
    rows = [_row(each, decode) for each in stored]
    return pa.RecordBatch.from_arrays(
        [pa.array([row.get(field.name) for row in rows], field.type) for field in TRAJECTORIES], schema=TRAJECTORIES
    )


def _row(stored: StoredTrajectory, decode: Decode | None) -> dict[str, Any]:
    facts, trajectory, labels = stored.facts, stored.trajectory, stored.labels
    assert facts is not None
    row = {**row_of(_EPISODE, EpisodeRow.of(stored.id, facts)), **row_of(_RECORD, facts)}
    if labels is not None:
        row |= {**row_of(_LABELS, labels), "reward": labels.reward, "outcome": labels.outcome}
    if trajectory is None:
        return row
    for field, columns in _IN_SPANS.items():
        row |= {name: column.write(getattr(trajectory, field)) for name, column in columns.items()}
    if decode is not None:
        row |= {"prompt": prompt(trajectory, decode), "answer": answer(trajectory, decode)}
    return row | {
        **row_of(_TRAJECTORY, trajectory),
        **row_of(_BY_TOKEN, trajectory),
        "token_ids": trajectory.tokens,
        **{name: getattr(trajectory, name).ravel() for name in (*_ROUTING, *_TABLES)},
    }


def rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The values of each row of `TRAJECTORIES`; a list of numbers stays an array of pyarrow."""
    # Arrays are read from their columns: as Python lists they would take a hundred times longer.
    rows: list[dict[str, Any]] = batch.drop_columns(_ARRAYS).to_pylist()
    for name in _ARRAYS:
        column = batch.column(name)
        for index, row in enumerate(rows):
            row[name] = column[index].values
    return rows


def read_row(row: Mapping[str, Any]) -> StoredTrajectory:
    """The trajectory in a row of `rows_of`. Raises InvariantError or ValueError: it is not valid; TypeError: a value is
    missing."""
    shared: dict[str, Any] = {name: _MISSING.get(name) if row[name] is None else row[name] for name in _IN_BOTH}
    facts = TrajectoryRecord(
        row["group_id"],
        state=TrajectoryState(row["state"]),
        last_plan=-1 if row["step"] is None else row["step"],
        **shared,
        **values_of(_RECORD, row),
    )
    labels = None
    if row["scorer"] is not None:
        labels = Labels(row["id"], row["reward"], row["outcome"], **values_of(_LABELS, row))
    return StoredTrajectory(row["id"], facts, None if row["task_id"] is None else _trajectory(row), labels, None)


_MISSING = {"lag": -1, "reward": 0.0, "outcome": 0.0}


def _read_all(columns: Columns, row: Mapping[str, Any]) -> Iterator[Any]:
    return (column.read(row[name]) for name, column in columns.items())


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    spans: dict[str, Any] = {
        field: tuple(noun(*each) for each in zip(*_read_all(_IN_SPANS[field], row), strict=True))
        for field, noun in _SPANS.items()
    }
    tokens = _TOKENS["token_ids"].read(row["token_ids"])
    routing = _ROUTING["routed_experts"].read(row["routed_experts"])
    return Trajectory(
        row["id"],
        group_id=row["group_id"],
        member=row["member"],
        finish=Finish(row["finish"]),
        tokens=tokens,
        version_runs=runs_of(_BY_TOKEN["versions"].read(row["versions"])),
        routed_experts=routing.reshape(len(tokens), -1) if routing.size else NO_ROUTING,
        image_spans=_TABLES["image_spans"].read(row["image_spans"]).reshape(-1, 2),
        image_digests=_TABLES["image_digests"].read(row["image_digests"]).reshape(-1, DIGEST_BYTES),
        **spans,
        **values_of(_TRAJECTORY, row),
    )
