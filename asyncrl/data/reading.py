"""Tasks from Parquet in verl's layout, read by row from the columns, so that millions of them cost little memory.

Columns: `prompt` (messages), `data_source`, `reward_model` (a struct with `ground_truth`), optional `extra_info` (a
struct with `index`, `split`, `tools_kwargs` ...) and optional `tools` (OpenAI schemas, as structs or as JSON text).
A task's id is `data_source/split/index`; where `index` is missing or not unique, the row's number stands for it, and
where `split` is missing, the file's stem.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from asyncrl.errors import DataError
from asyncrl.types import Task

REQUIRED = ("prompt", "data_source", "reward_model")
OPTIONAL = ("extra_info", "tools")
RECENT_TASKS = 1024


class TaskFile(Sequence[Task]):
    """The tasks of one file. Raises DataError where the file, a column or a row cannot be used, naming it."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            names = set(pq.read_schema(self._path).names)
            self._table = pq.read_table(self._path, columns=[n for n in (*REQUIRED, *OPTIONAL) if n in names])
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from error
        self._check(sorted(names))
        self._indexed = self._has_unique_index()
        # The members of a group, their scoring and their labels all ask for the same task.
        self._recent = lru_cache(RECENT_TASKS)(self._read)

    def _check(self, names: Sequence[str]) -> None:
        missing = [name for name in REQUIRED if name not in names]
        if missing:
            raise DataError(f"{self._path} has no column {', '.join(missing)}; it has {', '.join(names)}")
        if "ground_truth" not in self._fields("reward_model"):
            raise DataError(f"{self._path}: column reward_model must be a struct with a field ground_truth")
        prompts = self._table.column("prompt")
        if not _is_list(prompts.type) or not {"role", "content"} <= set(_fields(prompts.type.value_type)):
            raise DataError(f"{self._path}: column prompt must be a list of messages, each with role and content")
        if "extra_info" in self._table.column_names and not self._fields("extra_info"):
            raise DataError(
                f"{self._path}: column extra_info must be a struct, as {{'index': 0}}; leave it out otherwise"
            )
        for name in REQUIRED:
            self._check_rows(name, pc.is_null(self._table.column(name)), "is null")
        self._check_rows("prompt", pc.equal(pc.list_value_length(prompts), 0), "has no messages")
        truths = pc.struct_field(self._table.column("reward_model"), "ground_truth")
        self._check_rows("reward_model.ground_truth", pc.is_null(truths), "is null")

    def _check_rows(self, column: str, bad: pa.ChunkedArray, what: str) -> None:
        row = pc.index(bad, True).as_py()
        if row >= 0:
            raise DataError(f"{self._path}: row {row}, column {column} {what}; mend or drop the row")

    def _has_unique_index(self) -> bool:
        extra = self._table.column("extra_info") if "extra_info" in self._table.column_names else None
        if extra is None or "index" not in self._fields("extra_info"):
            return False
        index = pc.struct_field(extra, "index")
        if index.null_count or not (pa.types.is_integer(index.type) or pa.types.is_string(index.type)):
            return False
        keyed = pa.table({"source": self._table.column("data_source"), "index": index})
        if "split" in self._fields("extra_info"):
            keyed = keyed.append_column("split", pc.struct_field(extra, "split"))
        return bool(keyed.group_by(keyed.column_names).aggregate([]).num_rows == len(self))

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
        return self._recent(row)

    def _read(self, row: int) -> Task:
        return self._task(row, self._table.slice(row, 1).to_pylist()[0])

    def _task(self, row: int, values: Mapping[str, Any]) -> Task:
        extra = _plain(values.get("extra_info") or {})
        source = str(values["data_source"])
        truth = values["reward_model"]["ground_truth"]
        index = extra["index"] if self._indexed else row
        return Task(
            id=f"{source}/{extra.get('split', self._path.stem)}/{index}",
            messages=[_plain(message) for message in values["prompt"]],
            ground_truth=json.dumps(_plain(truth)) if isinstance(truth, (list, Mapping)) else str(truth),
            data_source=source,
            tools=self._tools(row, values.get("tools")),
            tools_kwargs=extra.pop("tools_kwargs", {}),
            extra_info=extra,
        )

    def _tools(self, row: int, tools: Any) -> Sequence[Mapping[str, Any]]:
        try:
            parsed = json.loads(tools) if isinstance(tools, str) else tools or ()
            return tuple(json.loads(tool) if isinstance(tool, str) else _plain(tool) for tool in parsed)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{self._path}: row {row}, column tools is neither schemas nor JSON text: {error}"
            ) from error


def read_tasks(path: str | Path) -> Sequence[Task]:
    """The tasks of a Parquet file, by row. Raises DataError."""
    return TaskFile(path)


def _fields(kind: pa.DataType) -> list[str]:
    return [kind.field(index).name for index in range(kind.num_fields)] if pa.types.is_struct(kind) else []


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _plain(value: Any) -> Any:
    """Values that a message can carry, without nulls: Parquet gives every struct of a column all of the column's
    fields, and those that a row never had are null."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, (str, int, float, bytes)) else str(value)
