"""Writes tasks as Parquet in verl's layout, and demonstrations as Parquet with a column of conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.errors import DataError
from asyncrl.machine.files import partial_name, sync
from asyncrl.types import Task, without_nulls


def write_tasks(path: Path, tasks: Iterable[Task]) -> int:
    """Write a file atomically, and return the number of tasks. A missing `index` becomes the row's number.

    Raises DataError: `path` is a folder, or a field has values of several types. Raises OSError.
    """
    rows = [_without_empty(row_of(number, task)) for number, task in enumerate(tasks)]
    if any(isinstance(row["extra_info"]["index"], str) for row in rows):
        for row in rows:
            row["extra_info"]["index"] = str(row["extra_info"]["index"])
    try:
        table = pa.Table.from_pylist(rows)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise DataError(
            f"{path}: a field of the tasks has values of types that do not fit into one column: {error}"
        ) from error
    for number, (row, column) in enumerate(zip(rows, table.to_pylist(), strict=True)):
        # In a column, a single decimal turns all integers into decimals. The comparison finds such a change.
        if _exact(row) != _exact(column):
            raise DataError(f"{path}: row {number} has values that their columns would change: {row!r:.200}")
    _write(table, path)
    return len(rows)


def write_conversations(path: Path, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Write the column `messages` of demonstrations as JSON text, atomically.

    Raises DataError: `path` is a folder, or a text has half a surrogate pair. Raises OSError.
    """
    texts = [json.dumps(messages, ensure_ascii=False) for messages in conversations]
    try:
        column = pa.array(texts, pa.string())
    except UnicodeEncodeError as error:
        raise DataError(f"{path}: a demonstration has a text that is not valid Unicode: {error}") from error
    _write(pa.table({"messages": column}), path)


def _write(table: pa.Table, path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file that ends in .parquet")
    partial = partial_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, partial, compression="zstd")
    sync(partial)
    partial.rename(path)


def _without_empty(value: Any) -> Any:
    """The value without empty mappings, which Parquet cannot store."""
    if isinstance(value, Mapping):
        inner = {name: _without_empty(each) for name, each in value.items()}
        return {name: each for name, each in inner.items() if each != {}}
    return value


def _exact(row: Mapping[str, Any]) -> str:
    return json.dumps(without_nulls(row), sort_keys=True, default=repr)


def row_of(number: int, task: Task) -> dict[str, Any]:
    """A task in verl's layout. A missing `index` becomes `number`."""
    # Schemas are written as JSON text, because Parquet would give every struct in a column the fields of all structs
    # there.
    extra: dict[str, Any] = {"index": number, **task.extra_info}
    return {
        **task.columns,
        "prompt": [dict(message) for message in task.messages],
        "data_source": task.data_source,
        "reward_model": task.columns.get("reward_model", {"style": "rule", "ground_truth": task.ground_truth}),
        "extra_info": extra,
        "tools": json.dumps(list(task.tools)) if task.tools else None,
    }
