"""Gives access to rows by number, with exactly the values in their files.

Rows from Parquet and Arrow stay in columns. Rows from JSON, and rows in the file that a run makes (`made_rows.py`), are
packed: each is one msgpack value. In a column, all values would have one type, so a single decimal would turn all
integers of the column into decimals.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from asyncrl.data.columns import is_plain
from asyncrl.data.sendable import plain
from asyncrl.errors import WireError
from asyncrl.msgpack_values import decoder, pack
from asyncrl.types import without_nulls

PACKED = "row"
"""The column of packed rows."""
ROWS_AT_ONCE = 10_000
_WITH_NULLS = ("extra_info", "reward_model")
"""Columns in which nulls within a value are kept, as in verl. In other columns a null means that the row lacks the
field."""
_ROW = decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file, or a folder of `datasets`, whose rows have the numbers `first` to `first + rows - 1`.

    `lines`: each row is a line of a text file.
    """

    path: Path
    first: int
    rows: int
    lines: bool

    def place(self, row: int) -> str:
        """The position of row `row` as text. Lines are counted from 1, other rows from 0."""
        return f"{self.path}: {'line' if self.lines else 'row'} {row - self.first + self.lines}"


@dataclass(frozen=True, slots=True)
class RowTable:
    """Rows with the same schema. The first row has the number `first`. A packed table has only the column PACKED."""

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
    """The rows of all files, in order.

    - `columns`: the columns that at least one file has
    - `made`: the file of rows that the run has made; None if the rows come from `files`
    - `facts`: the columns of `asyncrl.data.facts` in the file `made`; None without such a file
    """

    parts: Sequence[RowTable]
    files: Sequence[TableFile]
    columns: frozenset[str] = frozenset()
    made: Path | None = None
    facts: pa.Table | None = None

    def __len__(self) -> int:
        return sum(len(part.table) for part in self.parts)

    def values(self, row: int) -> Mapping[str, Any]:
        """The values of a row by column."""
        part = self.parts[bisect_right(self.parts, row, key=lambda part: part.first) - 1]
        (values,) = _values(part.table.slice(row - part.first, 1), part.is_packed)
        return values

    def file_of(self, row: int) -> TableFile:
        return self.files[bisect_right(self.files, row, key=lambda file: file.first) - 1]


def packed(rows: Iterable[Mapping[str, Any]]) -> pa.Array:
    """The rows as a column of packed rows. Raises WireError: a value cannot be sent."""
    return pa.array([pack(row, "the row") for row in rows], pa.large_binary())


def parts_of(tables: Iterable[pa.Table]) -> list[RowTable]:
    """The tables in order; consecutive tables with the same schema become one part."""
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
    """The values of rows that are stored in columns.

    Raises ValueError, TypeError, LookupError or OverflowError: Python cannot represent a value.
    """
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
