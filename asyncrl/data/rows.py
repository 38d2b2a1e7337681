"""Rows by their number, with the values that they have in their files.

Rows of Parquet and Arrow stay in columns. Rows of JSON and those that a start writes are packed, each as one message:
a column gives its values one type, so one decimal would turn all whole numbers into decimals.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from asyncrl import wire
from asyncrl.data.columns import is_plain
from asyncrl.data.sendable import plain
from asyncrl.errors import WireError
from asyncrl.types import without_nulls

PACKED = "row"
"""The column of packed rows."""
ROWS_AT_ONCE = 10_000
_WITH_NULLS = ("extra_info", "reward_model")
"""Columns whose nulls user code sees, as with verl. Elsewhere a null means that the row has no such field."""
_ROW = wire.decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class TableFile:
    """One of the files, or one folder of `datasets`: its rows have the numbers `first` to `first + rows - 1`."""

    path: Path
    first: int
    rows: int
    lines: bool

    def place(self, row: int) -> str:
        """The file and row number of row `row`, in words. Lines are counted from 1, and other rows from 0."""
        return f"{self.path}: {'line' if self.lines else 'row'} {row - self.first + self.lines}"


@dataclass(frozen=True, slots=True)
class RowTable:
    """Rows of one schema, the first of which has the number `first`; packed ones have the column PACKED alone."""

    first: int
    table: pa.Table

    @property
    def is_packed(self) -> bool:
        return bool(self.table.column_names == [PACKED])

    def each(self) -> Iterator[Mapping[str, Any]]:
        """The values of all rows, in order."""
        for batch in self.table.to_batches(ROWS_AT_ONCE):
            yield from _values(batch, self.is_packed)


@dataclass(frozen=True)
class Rows:
    """The rows of all files, in order. `columns` are those that any file has. `made` is the file that a start made of
    them, where it did; `facts` are then the columns of `asyncrl.data.facts`, which it also has."""

    parts: Sequence[RowTable]
    files: Sequence[TableFile]
    columns: frozenset[str] = frozenset()
    made: Path | None = None
    facts: pa.Table | None = None

    def __len__(self) -> int:
        return sum(len(part.table) for part in self.parts)

    def values(self, row: int) -> Mapping[str, Any]:
        """The values of a row by their columns."""
        part = self.parts[bisect_right(self.parts, row, key=lambda part: part.first) - 1]
        (values,) = _values(part.table.slice(row - part.first, 1), part.is_packed)
        return values

    def file_of(self, row: int) -> TableFile:
        return self.files[bisect_right(self.files, row, key=lambda file: file.first) - 1]


def packed(rows: Iterable[Mapping[str, Any]]) -> pa.Array:
    """The column of packed rows. Raises WireError: a value cannot be sent."""
    return pa.array([wire.pack(row, "the row") for row in rows], pa.large_binary())


def parts_of(tables: Iterable[pa.Table]) -> list[RowTable]:
    """Tables in order; tables with the same columns become one part."""
    parts: list[RowTable] = []
    first = 0
    for table in tables:
        if parts and parts[-1].table.schema.equals(table.schema):
            parts[-1] = RowTable(parts[-1].first, pa.concat_tables([parts[-1].table, table]))
        elif len(table):
            parts.append(RowTable(first, table))
        first += len(table)
    return parts


def arrow_values(rows: pa.Table | pa.RecordBatch) -> Iterator[Mapping[str, Any]]:
    """The values of rows in columns. Raises ValueError, TypeError, LookupError or OverflowError: Python has no such
    value."""
    given = rows.to_pylist()
    if not all(is_plain(kind) for kind in rows.schema.types):
        given = [plain(row) for row in given]
    for row in given:
        yield {name: value if name in _WITH_NULLS else without_nulls(value) for name, value in row.items()}


def _values(rows: pa.Table | pa.RecordBatch, are_packed: bool) -> Iterator[Mapping[str, Any]]:
    if not are_packed:
        yield from arrow_values(rows)
        return
    for row in rows.column(0):
        yield _unpacked(row.as_buffer())


def _unpacked(row: Any) -> dict[str, Any]:
    try:
        return _ROW.decode(row)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"a packed row is damaged: {error}") from error
