"""Stores the rows of a run's tasks in one Arrow file. The processes of the run map it into memory and read single rows.

The file is written when a run starts, in three cases: a class makes the tasks, a source is not a file, or the rows do
not fit into memory (`data.keep_in_memory=false`). The file has the packed rows (`asyncrl.data.rows`) in the order of
the sources, with the source of each row. It is written in parts, so it may be larger than memory. The run keeps the
file, because episodes refer to tasks by their row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from asyncrl.data.facts import FACTS, facts_of_tasks
from asyncrl.data.row_tasks import Origin, RowReader
from asyncrl.data.rows import PACKED, Rows, RowTable, TableFile, packed
from asyncrl.data.sources import RowPart
from asyncrl.errors import DataError
from asyncrl.machine.files import partial_name, sync

SUFFIX = ".arrow"
_SCHEMA = pa.schema([*FACTS, (PACKED, pa.large_binary())])


def write_rows(
    path: Path, parts: Iterable[RowPart], reader: RowReader, advance: Callable[[int], None] = lambda rows: None
) -> int:
    """Write the rows of all parts, and return their number. `advance` is called with the number of rows just written.

    Raises DataError: a source cannot be read, or `reader` cannot make a task from a row. Raises OSError.
    """
    partial = partial_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    try:
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as out:
            for table, part in _tables(parts, reader):
                where = {"path": part.path, "lines": str(int(part.lines)), "first": str(part.first)}
                out.write_batch(table.combine_chunks().to_batches()[0], custom_metadata=where)
                advance(len(table))
                count += len(table)
        if not count:
            raise DataError("there are no rows; each row is a task")
    except DataError:
        partial.unlink(missing_ok=True)
        raise
    sync(partial)
    partial.rename(path)
    return count


def read_made(path: Path) -> Rows:
    """The rows that `write_rows` wrote, mapped into memory. Raises DataError."""
    try:
        with pa.ipc.open_file(pa.memory_map(str(path))) as made:
            found = [made.get_batch_with_custom_metadata(number) for number in range(made.num_record_batches)]
        table = pa.Table.from_batches([batch for batch, _ in found], _SCHEMA)
        files: list[TableFile] = []
        for first, (batch, where) in zip(_starts(batch.num_rows for batch, _ in found), found, strict=False):
            name, lines = Path(where[b"path"].decode()), where[b"lines"] == b"1"
            # A source that is listed twice begins again with its row 0. Files of older versions lack `first`.
            continues = files and files[-1].path == name and where.get(b"first") != b"0"
            last = files.pop() if continues else TableFile(name, first, 0, lines)
            files.append(TableFile(name, last.first, last.rows + batch.num_rows, lines))
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read: {error}; start a run with another run.name") from error
    parts = [RowTable(0, table.select([PACKED]))]
    return Rows(parts, files, made=path, facts=table.select(FACTS.names))


def _tables(parts: Iterable[RowPart], reader: RowReader) -> Iterator[tuple[pa.Table, RowPart]]:
    for part in parts:
        file = TableFile(Path(part.path), 0, len(part.rows), part.lines)
        origins = (Origin(file, part.first + row) for row in range(len(part.rows)))
        facts = facts_of_tasks(map(reader.task, part.rows, origins))
        yield facts.append_column(PACKED, packed(part.rows)), part


def _starts(rows: Iterable[int]) -> Iterator[int]:
    first = 0
    for count in rows:
        yield first
        first += count
