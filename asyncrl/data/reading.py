"""Tasks from Parquet in verl's layout, read by row from the columns, so that millions of them cost little memory.

Columns: `prompt` (messages), `data_source`, `reward_model` (a struct with `ground_truth`), optional `extra_info` (a
struct with `index`, `split`, `tools_kwargs` ...) and optional `tools` (OpenAI schemas, as structs or as JSON text).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from asyncrl.errors import DataError
from asyncrl.types import Task

REQUIRED = ("prompt", "data_source", "reward_model")


class TaskFile(Sequence[Task]):
    """The tasks of one file. Raises DataError where the file, a column or a row cannot be used, naming it."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            self._table = pq.read_table(self._path)
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from error
        self._check()

    def _check(self) -> None:
        names = self._table.column_names
        missing = [name for name in REQUIRED if name not in names]
        if missing:
            raise DataError(f"{self._path} has no column {', '.join(missing)}; it has {', '.join(names)}")
        if "ground_truth" not in self._fields("reward_model"):
            raise DataError(f"{self._path}: column reward_model must be a struct with a field ground_truth")
        prompts = self._table.column("prompt")
        if not pa.types.is_list(prompts.type) or not {"role", "content"} <= set(_fields(prompts.type.value_type)):
            raise DataError(f"{self._path}: column prompt must be a list of messages, each with role and content")
        for name in REQUIRED:
            self._check_rows(name, pc.is_null(self._table.column(name)), "is null")
        self._check_rows("prompt", pc.equal(pc.list_value_length(prompts), 0), "has no messages")
        truths = pc.struct_field(self._table.column("reward_model"), "ground_truth")
        self._check_rows("reward_model.ground_truth", pc.is_null(truths), "is null")

    def _check_rows(self, column: str, bad: pa.ChunkedArray, what: str) -> None:
        row = pc.index(bad, True).as_py()
        if row >= 0:
            raise DataError(f"{self._path}: row {row}, column {column} {what}; mend or drop the row")

    def _fields(self, column: str) -> list[str]:
        return _fields(self._table.schema.field(column).type)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, row: int) -> Task: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Task]: ...
    def __getitem__(self, row: int | slice) -> Task | Sequence[Task]:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self._task(row, self._table.slice(row, 1).to_pylist()[0])

    def _task(self, row: int, values: Mapping[str, Any]) -> Task:
        extra = _without_nulls(values.get("extra_info") or {})
        source = str(values["data_source"])
        index = extra.get("index", row)
        return Task(
            id=f"{source}/{extra.get('split', self._path.stem)}/{index}",
            messages=[_without_nulls(message) for message in values["prompt"]],
            ground_truth=str(values["reward_model"]["ground_truth"]),
            data_source=source,
            tools=self._tools(row, values.get("tools")),
            tools_kwargs=extra.pop("tools_kwargs", {}),
            extra_info=extra,
        )

    def _tools(self, row: int, tools: Any) -> Sequence[Mapping[str, Any]]:
        try:
            parsed = json.loads(tools) if isinstance(tools, str) else tools or ()
            return [json.loads(tool) if isinstance(tool, str) else _without_nulls(tool) for tool in parsed]
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{self._path}: row {row}, column tools is neither schemas nor JSON text: {error}"
            ) from error


def read_tasks(path: str | Path) -> Sequence[Task]:
    """The tasks of a Parquet file, by row. Raises DataError."""
    return TaskFile(path)


def _fields(kind: pa.DataType) -> list[str]:
    return [kind.field(index).name for index in range(kind.num_fields)] if pa.types.is_struct(kind) else []


def _without_nulls(value: Any) -> Any:
    """Parquet gives every struct of a column all of the column's fields; those that a row never had are null."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
