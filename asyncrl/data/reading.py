"""Tasks from files in verl's layout. Rows are read from columns on demand, so millions of them take little memory.

Columns: `prompt` (messages), `data_source`, `reward_model` (a struct with `ground_truth`), optional `extra_info` (a
struct with `index`, `split`, `tools_kwargs` ...), optional `tools` (OpenAI schemas, as structs or as JSON text) and
optional `environment` (text, which becomes `extra_info.environment` of the task). The option
`data.demonstration` names one more column: what a demonstration adds to the prompt, as messages, as their JSON text, or
as plain text, which is one answer; null where a task has none.

A task's id is `data_source/split/index`. The row's number in all files together replaces an `index` that is missing or
not unique, and the stem of the row's file replaces a missing `split`.

Opening a file checks all of it, column by column. Otherwise a row that no message can carry would stop a run half-way:
an integer of more than 64 bits or half of a surrogate pair in a schema, text that is not UTF-8.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from asyncrl.data.demonstrations import read_continuation
from asyncrl.data.layout import AS_THEY_ARE, RowLayout
from asyncrl.data.sendable import MAX_DEPTH, check_sendable, plain, schemas
from asyncrl.data.tables import Rows, TableFile, read_rows
from asyncrl.errors import DataError, WireError
from asyncrl.ids import task_id
from asyncrl.types import Task
from asyncrl.wire import task_body

REQUIRED = ("prompt", "data_source", "reward_model")
ENVIRONMENT = "environment"
"""The column, or else the field of `extra_info`, that names the environment of a task."""
OPTIONAL = ("extra_info", "tools", ENVIRONMENT)
RECENT_TASKS = 1024


def required_columns(demonstration: str | None) -> tuple[str, ...]:
    """The columns that files of tasks must have, with the one of demonstrations where it is named."""
    return REQUIRED if demonstration is None else (*REQUIRED, demonstration)


class TaskFile(Sequence[Task]):
    """The tasks of one file, or of several (`asyncrl.data.tables`), or of the `rows` that a start made of the sources;
    with the demonstrations of the column `demonstration`, if one is named. Raises DataError, which names the file,
    column or row that cannot be used."""

    def __init__(
        self,
        sources: str | Path | Sequence[str | Path],
        demonstration: str | None = None,
        layout: RowLayout = AS_THEY_ARE,
        rows: Rows | None = None,
    ) -> None:
        sources = [sources] if isinstance(sources, (str, Path)) else sources
        self._name = ", ".join(map(str, sources))
        self._demonstration = demonstration
        self._layout = layout
        self._rows = rows or read_rows(sources, required_columns(demonstration), OPTIONAL, layout)
        self._table = self._rows.table
        self._numbers: Sequence[int] | NDArray[np.int64] = range(self._table.num_rows)
        self._name_sources()
        self._check()
        self._indexed = self._has_unique_index()
        self._check_values()
        if "tools" in self._table.column_names:
            self._check_tools(self._table.column("tools"))
        # Many requests need the same task: those of a group's members, of their scoring and of their labels.
        self._recent = lru_cache(RECENT_TASKS)(self._read)

    @property
    def files(self) -> Sequence[TableFile]:
        """The files that hold the tasks."""
        return self._rows.files

    @property
    def made(self) -> Path | None:
        """The file that a start made of the rows; None: they are those of `files`."""
        return self._rows.made

    def place(self, row: int) -> str:
        """The file and the row or line of a task, in words."""
        number = int(self._numbers[row])
        return self._rows.file_of(number).place(number)

    def left(self, kept: NDArray[np.bool_]) -> TaskFile:
        """Only the tasks for which `kept` (bool[rows]) is true; their ids and places stay. No row is copied, since they
        may not fit into memory. Raises DataError: none."""
        if not kept.any():
            raise DataError(f"{self._name}: no task is left of {len(self)}")
        selected = copy.copy(self)
        selected._numbers = np.asarray(self._numbers, np.int64)[kept]
        selected._recent = lru_cache(RECENT_TASKS)(selected._read)
        return selected

    def _name_sources(self) -> None:
        """Data sources as plain texts. pandas writes few different texts as categories, which cannot be searched.

        Raises DataError: a data source is no text or number, or a split or an environment is none.
        """
        for name in ("data_source", ENVIRONMENT):
            if name in self._table.column_names:
                texts = self._as_texts(name, self._table.column(name))
                self._table = self._table.set_column(self._table.column_names.index(name), name, texts)
        if "extra_info" in self._table.column_names and "split" in self._fields("extra_info"):
            self._as_texts("extra_info.split", pc.struct_field(self._table.column("extra_info"), "split"))

    def _as_texts(self, name: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
        try:
            return values.cast(pa.large_string() if pa.types.is_large_string(values.type) else pa.string())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"{self._name}: {name} must be text, not {values.type}: {error}") from error

    def _check(self) -> None:
        if "ground_truth" not in self._fields("reward_model"):
            raise DataError(f"{self._name}: column reward_model must be a struct with a field ground_truth")
        prompts = self._table.column("prompt")
        if not _is_list(prompts.type) or not {"role", "content"} <= set(_fields(prompts.type.value_type)):
            raise DataError(f"{self._name}: column prompt must be a list of messages, each with role and content")
        if "extra_info" in self._table.column_names and not _is_struct(self._table.schema.field("extra_info").type):
            raise DataError(f"{self._name}: column extra_info must be a struct, as {{'index': 0}}")
        if not len(self):
            raise DataError(f"{self._name} has no rows; each row is a task")
        for name in REQUIRED:
            self._check_rows(name, pc.is_null(self._table.column(name)), "is null")
        self._check_rows("prompt", pc.equal(pc.list_value_length(prompts), 0), "has no messages")
        truths = pc.struct_field(self._table.column("reward_model"), "ground_truth")
        self._check_rows("reward_model.ground_truth", pc.is_null(truths), "is null")

    def _check_values(self) -> None:
        prompts = self._table.column("prompt")
        messages = pc.list_flatten(prompts)
        if not _is_text(prompts.type.value_type.field("role").type):
            raise DataError(f"{self._name}: in column prompt the role of a message must be text")
        if messages.null_count or pc.struct_field(messages, "role").null_count:
            self._read_all()
        if "extra_info" in self._table.column_names and "tools_kwargs" in self._fields("extra_info"):
            kind = self._table.schema.field("extra_info").type.field("tools_kwargs").type
            if not _is_struct(kind):
                raise DataError(f"{self._name}: extra_info.tools_kwargs must be a struct, tool by tool, not {kind}")
        if (deepest := max(_depth(field.type) for field in self._table.schema)) > MAX_DEPTH:
            raise DataError(f"{self._name}: a column is nested {deepest} deep; at most {MAX_DEPTH} can be sent")
        try:
            self._table.validate(full=True)
        except pa.ArrowInvalid as error:
            self._read_all()
            raise DataError(f"{self._name} is damaged: {error}") from error
        for column in self._table.columns:
            self._check_times(column)

    def _check_times(self, values: pa.ChunkedArray) -> None:
        """Times may have no value in Python: those with nanoseconds, of absurd years or in an unknown time zone."""
        kind = values.type
        if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
            try:
                pc.unique(values).to_pylist()
            except (ValueError, TypeError, LookupError, OverflowError):
                self._read_all()
        elif _is_list(kind):
            self._check_times(pc.list_flatten(values))
        else:
            for name in _fields(kind):
                self._check_times(pc.struct_field(values, name))

    def _check_tools(self, tools: pa.ChunkedArray) -> None:
        """Checks each distinct text once, however many rows have it."""
        kind = tools.type
        if _is_list(kind):
            tools, kind = pc.list_flatten(tools), kind.value_type
            if tools.null_count:
                self._read_all()
        if _is_text(kind):
            try:
                for text in pc.unique(tools.drop_null()).to_pylist():
                    schemas(text)
            except ValueError:
                self._read_all()
        elif pa.types.is_struct(kind):
            if "function" in _fields(kind):
                tools, kind = pc.struct_field(tools, "function"), kind.field("function").type
            types = {name: kind.field(name).type for name in _fields(kind)}
            name, parameters = types.get("name", pa.null()), types.get("parameters", pa.null())
            typed = _is_text(name) and (pa.types.is_struct(parameters) or pa.types.is_null(parameters))
            if not typed or tools.null_count or pc.struct_field(tools, "name").null_count:
                self._read_all()
        elif not pa.types.is_null(kind):
            raise DataError(f"{self._name}: column tools is neither schemas nor JSON text, but {tools.type}")

    def _read_all(self) -> None:
        """Find the first row that cannot be read, after a check found that there is one. Raises DataError."""
        for row in range(len(self)):
            self._read(row)

    def _check_rows(self, column: str, bad: pa.ChunkedArray, what: str) -> None:
        row = pc.index(bad, True).as_py()
        if row >= 0:
            raise DataError(f"{self.place(row)}, column {column} {what}; mend or drop the row")

    def _has_unique_index(self) -> bool:
        if "extra_info" not in self._table.column_names or "index" not in self._fields("extra_info"):
            return False
        extra = self._table.column("extra_info")
        index = pc.struct_field(extra, "index")
        if index.null_count or not (pa.types.is_integer(index.type) or pa.types.is_string(index.type)):
            return False
        keyed = pa.table({"source": self._table.column("data_source"), "index": index, "split": self._splits(extra)})
        return bool(keyed.group_by(keyed.column_names).aggregate([]).num_rows == len(self))

    def _splits(self, extra: pa.ChunkedArray) -> pa.ChunkedArray:
        """The split of each row as its id has it."""
        stems = pa.chunked_array([pa.repeat(file.path.stem, file.rows) for file in self._rows.files])
        if "split" not in self._fields("extra_info"):
            return stems
        return pc.coalesce(pc.struct_field(extra, "split").cast(pa.string()), stems)

    def _fields(self, column: str) -> list[str]:
        return _fields(self._table.schema.field(column).type)

    def __len__(self) -> int:
        return len(self._numbers)

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

    def by_roles(self) -> dict[int, Task]:
        """The first row for each order of roles in the prompts, by its number."""
        messages = self._column("prompt")
        first: dict[tuple[str, ...], int] = {}
        row = 0
        for chunk in messages.chunks:
            roles = pc.struct_field(pc.list_flatten(chunk), "role").to_pylist()
            position = 0
            for length in pc.list_value_length(chunk).to_pylist():
                first.setdefault(tuple(roles[position : position + length]), row)
                position, row = position + length, row + 1
        return {row: self[row] for row in first.values()}

    def by_source(self) -> dict[int, Task]:
        """The first row of each data source, by its number."""
        sources = self._column("data_source")
        rows = [pc.index(sources, source).as_py() for source in pc.unique(sources)]
        return {row: self[row] for row in rows}

    def extra_texts(self, name: str) -> dict[str, int]:
        """The different texts of `extra_info.NAME`, each with the number of its first row. Raises DataError: the field
        has other values than texts."""
        if "extra_info" not in self._table.column_names or name not in self._fields("extra_info"):
            return {}
        values = pc.struct_field(self._column("extra_info"), name)
        if pa.types.is_null(values.type):
            return {}
        if not _is_text(values.type):
            raise DataError(f"{self._name}: extra_info.{name} must be JSON text, not {values.type}")
        found: dict[str, int] = {}
        for row, text in enumerate(values.to_pylist()):
            if text is not None:
                found.setdefault(text, row)
        return found

    def by_environment(self) -> dict[int, Task]:
        """The first row of each environment that tasks name, by its number, and the first row of a file with such a
        column that names none; empty where there is no such column."""
        if ENVIRONMENT in self._table.column_names:
            names = self._column(ENVIRONMENT)
        elif "extra_info" in self._table.column_names and ENVIRONMENT in self._fields("extra_info"):
            names = pc.struct_field(self._column("extra_info"), ENVIRONMENT)
        else:
            return {}
        rows = [pc.index(names, name).as_py() for name in pc.unique(names.drop_null())]
        if names.null_count:
            rows.append(pc.index(pc.is_null(names), True).as_py())
        return {row: self[row] for row in rows}

    def by_user(self) -> dict[int, Task]:
        """The first row of each simulated user that `extra_info.interaction_kwargs.name` names, by its number."""
        kind = self._table.schema.field("extra_info").type if "extra_info" in self._table.column_names else pa.null()
        for name in ("interaction_kwargs", "name"):
            if name not in _fields(kind):
                return {}
            kind = kind.field(name).type
        names = pc.struct_field(self._column("extra_info"), ["interaction_kwargs", "name"])
        rows = [pc.index(names, name).as_py() for name in pc.unique(names.drop_null())]
        return {row: self[row] for row in rows}

    def _column(self, name: str) -> pa.ChunkedArray:
        """The values of a column in the rows that are left."""
        column = self._table.column(name)
        return column if len(self) == len(column) else column.take(pa.array(self._numbers))

    def _read(self, row: int) -> Task:
        """Raises DataError: no message can carry the row."""
        try:
            task = self._task(row, self._table.slice(int(self._numbers[row]), 1).to_pylist()[0])
            check_sendable(task_body(task))
        except (WireError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
            raise DataError(f"{self.place(row)} cannot be sent: {error}; mend or drop the row") from error
        return task

    def _task(self, row: int, values: Mapping[str, Any]) -> Task:
        extra = plain(values.get("extra_info") or {})
        if values.get(ENVIRONMENT) is not None:
            extra[ENVIRONMENT] = values[ENVIRONMENT]
        source = str(values["data_source"])
        truth = values["reward_model"]["ground_truth"]
        number = int(self._numbers[row])
        index = extra["index"] if self._indexed else number
        return Task(
            id=task_id(source, extra.get("split", self._rows.file_of(number).path.stem), index),
            messages=self._layout.messages([_message(message) for message in values["prompt"]]),
            ground_truth=json.dumps(plain(truth), default=str) if isinstance(truth, (list, Mapping)) else str(truth),
            data_source=source,
            tools=self._tools(row, values.get("tools")),
            tools_kwargs=extra.pop("tools_kwargs", {}),
            extra_info=extra,
            demonstration=self._shown(row, values),
        )

    def _shown(self, row: int, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        if self._demonstration is None:
            return ()
        try:
            return read_continuation(values[self._demonstration])
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{self.place(row)}, column {self._demonstration}: {error}; mend it, or set it to null"
            ) from error

    def _tools(self, row: int, tools: Any) -> Sequence[Mapping[str, Any]]:
        try:
            if isinstance(tools, str):
                return tuple(schemas(tools))
            return tuple(schema for tool in tools or () for schema in schemas(tool))
        except ValueError as error:
            raise DataError(
                f"{self.place(row)}, column tools is neither schemas nor JSON text: {error}; mend or drop the row"
            ) from error


def _message(message: Mapping[str, Any] | None) -> Any:
    if message is None or message["role"] is None:
        raise ValueError("column prompt has a message without a role")
    made = plain(message)
    # Code of users finds a content in each message, as in verl; null where there is only a call.
    made.setdefault("content", None)
    return made


def _fields(kind: pa.DataType) -> list[str]:
    return [kind.field(index).name for index in range(kind.num_fields)] if pa.types.is_struct(kind) else []


def _is_struct(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) or pa.types.is_null(kind))


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _depth(kind: pa.DataType) -> int:
    """How many lists and maps are within each other."""
    depth, level = 0, [kind]
    while level:  # A file may be nested deeper than Python's stack.
        depth, level = depth + 1, [each.field(index).type for each in level for index in range(each.num_fields)]
    return depth


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
