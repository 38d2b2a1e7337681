"""Reads tasks from files in verl's layout. Rows become tasks on demand, so millions of rows take little memory.

Columns: `prompt` (messages), `data_source`, `reward_model` (a struct with `ground_truth`). Optional columns:

- `extra_info`: a struct with `index`, `split`, `tools_kwargs` and other fields.
- `tools`: OpenAI schemas, as structs or as JSON text.
- `environment`: text, which becomes `extra_info.environment` of the task.
- `images`: a list; each `<image>` in a text of the prompt marks the place of the next image.
- the column named by `data.demonstration`: messages that follow the prompt, their JSON text, or the plain text of one
  answer; null if the task has no demonstration.

A task's id is `data_source/split/index`. If an `index` is missing or not unique, all ids have the row's number instead,
counted over all files. If the `split` is missing, the stem of the file's name replaces it.

When files are opened, all rows are checked: those of Parquet column by column, those of JSON row by row. Files that the
run itself made (`made_rows.py`) were checked when they were written. Without the check, a row that cannot be sent in a
message would stop a run half-way. Such a row may have values nested too deep, half of a surrogate pair in a schema, or
text that is not UTF-8.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from asyncrl.data.columns import fields
from asyncrl.data.facts import facts_of_table, facts_of_tasks
from asyncrl.data.layout import AS_THEY_ARE, RowLayout
from asyncrl.data.row_tasks import OPTIONAL, UNUSABLE, Origin, RowReader, required_columns, unusable
from asyncrl.data.rows import Rows, RowTable, TableFile
from asyncrl.data.table_checks import TableChecks
from asyncrl.data.tables import column_names, read_rows
from asyncrl.errors import DataError
from asyncrl.types import Task

RECENT_TASKS = 1024


class TaskFile(Sequence[Task]):
    """The tasks of one or several files (`asyncrl.data.tables`), or of `rows` in a file that the run has made.

    `demonstration` is the column with demonstrations; None: tasks have no demonstrations. Raises DataError, which names
    the file, column or row that cannot be used.
    """

    def __init__(
        self,
        sources: str | Path | Sequence[str | Path],
        demonstration: str | None = None,
        layout: RowLayout = AS_THEY_ARE,
        rows: Rows | None = None,
    ) -> None:
        sources = [sources] if isinstance(sources, (str, Path)) else sources
        self._name = ", ".join(map(str, sources))
        self._reader = RowReader(layout, demonstration)
        self._rows = rows or read_rows(sources, required_columns(demonstration), OPTIONAL, layout)
        if not len(self._rows):
            raise DataError(f"{self._name} has no rows; each row is a task")
        self._numbers: Sequence[int] | NDArray[np.int64] = range(len(self._rows))
        self._indexed = False
        self._facts = self._rows.facts or pa.concat_tables([self._checked(part) for part in self._rows.parts])
        self._indexed = self._has_unique_index()
        # A cache, because the same task is needed many times: for every member of a group, and again to score it.
        self._recent = lru_cache(RECENT_TASKS)(self._read)

    @property
    def files(self) -> Sequence[TableFile]:
        """The files that hold the tasks."""
        return self._rows.files

    @property
    def made(self) -> Path | None:
        """The file of rows that the run has made; None if the rows come from `files`."""
        return self._rows.made

    def place(self, row: int) -> str:
        """The position of a task as text, such as `a.jsonl: line 3`."""
        number = int(self._numbers[row])
        return self._rows.file_of(number).place(number)

    def columns_at(self, row: int) -> list[str]:
        """The names of the columns of the task's file. Empty if a program made the task, or if it came from the hub.
        Raises DataError: the file cannot be read."""
        path = self._rows.file_of(int(self._numbers[row])).path
        return column_names(path) if path.exists() else []

    def left(self, kept: NDArray[np.bool_]) -> TaskFile:
        """The tasks for which `kept` (bool[rows]) is true, with unchanged ids. Raises DataError: no task is left.

        Rows are not copied, because they might not fit into memory a second time.
        """
        if not kept.any():
            raise DataError(f"{self._name}: no task is left of {len(self)}")
        selected = copy.copy(self)
        selected._numbers = np.asarray(self._numbers, np.int64)[kept]
        selected._recent = lru_cache(RECENT_TASKS)(selected._read)
        return selected

    def spread(self, count: int) -> TaskFile:
        """A selection of at most `count` tasks, evenly spread over the rows, with unchanged ids."""
        kept = np.zeros(len(self), np.bool_)
        kept[np.linspace(0, len(self) - 1, min(count, len(self))).astype(int)] = True
        return self.left(kept)

    def _checked(self, part: RowTable) -> pa.Table:
        """Check rows, and return their facts. Raises DataError: a row cannot be used."""
        numbers = range(part.first, part.first + len(part.table))
        if part.is_packed:
            rows = zip(numbers, part.each(), strict=True)
            return facts_of_tasks(self._reader.task(values, self._origin(number)) for number, values in rows)

        def read_all() -> None:
            for number in numbers:
                self._read(number)

        TableChecks(part.table, self._name, lambda row: self.place(part.first + row), read_all).check()
        return facts_of_table(part.table)

    def _has_unique_index(self) -> bool:
        if self._facts.column("index").null_count:
            return False
        keyed = self._facts.select(["data_source", "index"]).append_column("split", self._splits())
        return bool(keyed.group_by(keyed.column_names).aggregate([]).num_rows == len(self))

    def _splits(self) -> pa.ChunkedArray:
        """The split of each row, as in its id."""
        stems = [pa.repeat(pa.scalar(file.path.stem, pa.large_string()), file.rows) for file in self._rows.files]
        return pc.coalesce(self._facts.column("split"), pa.chunked_array(stems))

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
        """Maps row numbers to tasks: the first task for each sequence of roles that a prompt has."""
        return self._first_of_each("roles")

    def by_source(self) -> dict[int, Task]:
        """Maps row numbers to tasks: the first task of each data source."""
        return self._first_of_each("data_source")

    def rows_by_source(self) -> dict[str, list[int]]:
        """Maps each data source to the numbers of its rows, ascending."""
        found: dict[str, list[int]] = {}
        for row, source in enumerate(self._fact("data_source").to_pylist()):
            found.setdefault(source, []).append(row)
        return found

    def by_environment(self) -> dict[int, Task]:
        """Maps row numbers to tasks: the first task of each environment, and the first task without an environment.
        Empty if no task names an environment.
        """
        found = self._first_of_each("environment")
        row = pc.index(pc.is_null(self._fact("environment")), True).as_py() if found else -1
        return found if row < 0 else found | {row: self[row]}

    def by_user(self) -> dict[int, Task]:
        """Maps row numbers to tasks: the first task of each simulated user (`extra_info.interaction_kwargs.name`)."""
        return self._first_of_each("user")

    def _first_of_each(self, fact: str) -> dict[int, Task]:
        values = self._fact(fact)
        rows = [pc.index(values, value).as_py() for value in pc.unique(values.drop_null())]
        return {row: self[row] for row in rows}

    def extra_texts(self, name: str) -> dict[str, int]:
        """Maps each text that occurs in `extra_info.NAME` to the first row that has it. Raises DataError: a value is
        not text."""
        found: dict[str, int] = {}
        values = np.fromiter(chain.from_iterable(_extra(part, name) for part in self._rows.parts), object)
        for row, number in enumerate(self._numbers):
            text = values[number]
            if text is not None and not isinstance(text, str):
                raise DataError(f"{self.place(row)}: extra_info.{name} must be JSON text, not {text!r:.50}")
            if text is not None:
                found.setdefault(text, row)
        return found

    def texts_of(self, name: str) -> dict[str, int]:
        """Maps each value of the column NAME, as text, to the first row that has it. If a row has no such value, its
        `extra_info.NAME` counts. The rows must be whole (`RowLayout.whole_rows`)."""
        found: dict[str, int] = {}
        columns = chain.from_iterable(_column(part, name) for part in self._rows.parts)
        extras = chain.from_iterable(_extra(part, name) for part in self._rows.parts)
        values = [extra if value is None else value for value, extra in zip(columns, extras, strict=True)]
        for row, number in enumerate(self._numbers):
            if values[number] is not None:
                found.setdefault(str(values[number]), row)
        return found

    def _fact(self, name: str) -> pa.ChunkedArray:
        """The fact `name` of each task that `left` kept, or of all tasks."""
        column = self._facts.column(name)
        return column if len(self) == len(column) else column.take(pa.array(self._numbers))

    def _origin(self, number: int) -> Origin:
        return Origin(self._rows.file_of(number), number)

    def _read(self, row: int) -> Task:
        """The task of a row. Raises DataError: no message can carry the row."""
        origin = self._origin(int(self._numbers[row]))
        try:
            values = self._rows.values(origin.number)
        except UNUSABLE as error:
            raise unusable(origin.place, error) from error
        return self._reader.task(values, origin, self._indexed)


def _extra(part: RowTable, name: str) -> Iterator[Any]:
    """The values of the field `name` of `extra_info`, one per row."""
    if part.is_packed:
        yield from ((row.get("extra_info") or {}).get(name) for row in part.each())
        return
    known = "extra_info" in part.table.column_names and name in fields(part.table.schema.field("extra_info").type)
    column = pc.struct_field(part.table.column("extra_info"), name) if known else pa.nulls(len(part.table))
    yield from column.to_pylist()


def _column(part: RowTable, name: str) -> Iterator[Any]:
    """The values of the column `name`, one per row."""
    if part.is_packed:
        yield from (row.get(name) for row in part.each())
        return
    known = name in part.table.column_names
    yield from (part.table.column(name) if known else pa.nulls(len(part.table))).to_pylist()
