"""The rows of a run's tasks in one Arrow file, which roles map into their memory and read row by row.

A start writes it where sources name no files, and where the rows of files do not fit into memory
(`data.keep_in_memory=false`). The file has the order of the sources, and says which rows came from where. It is written
part by part, so that its size does not matter, and a run keeps it: its episodes know tasks by their place in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from asyncrl.data.layout import RowLayout
from asyncrl.data.sources import RowPart, parts
from asyncrl.data.tables import MISMATCH, Rows, TableFile
from asyncrl.errors import DataError
from asyncrl.machine.files import partial_name, sync

SUFFIX = ".arrow"
_FILES = b"asyncrl.files"


def write_rows(
    path: Path,
    sources: Sequence[str],
    required: Sequence[str],
    optional: Sequence[str],
    layout: RowLayout,
    advance: Callable[[int], None] = lambda rows: None,
) -> int:
    """Write the rows of all sources; returns how many. `advance` is told of rows as they are written. The sources are
    read twice: first for the types of their columns.

    Raises DataError: a source cannot be read, lacks a required column or does not go with the others; OSError: the
    disk.
    """
    wanted = (*required, *optional)
    schema, files = _survey(sources, wanted, layout)
    if missing := [name for name in required if name not in schema.names]:
        raise DataError(f"{', '.join(sources)}: there is no column {', '.join(missing)}; see data.columns")
    schema = schema.with_metadata({_FILES: json.dumps(files).encode()})
    partial = partial_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    try:
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, schema) as out:
            for part in _all(sources, wanted, layout):
                out.write_table(_as(part, schema))
                advance(part.table.num_rows)
                count += part.table.num_rows
    except pa.ArrowInvalid as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"{', '.join(sources)} cannot be written as Arrow: {error}; nest values less deep") from error
    if count != sum(rows for _, rows, _ in files):
        partial.unlink()
        raise DataError(f"{', '.join(sources)} gave other rows when they were read again; they must not change")
    sync(partial)
    partial.rename(path)
    return count


def read_made(path: Path) -> Rows:
    """The rows that `write_rows` wrote, which stay on the disk until they are needed. Raises DataError."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        listed = json.loads(table.schema.metadata[_FILES])
        files, first = [], 0
        for name, rows, lines in listed:
            files.append(TableFile(Path(name), first, rows, lines))
            first += rows
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read: {error}; another run.name makes it anew") from error
    return Rows(table.replace_schema_metadata(None), files, path)


def _all(sources: Sequence[str], wanted: Sequence[str], layout: RowLayout) -> Iterator[RowPart]:
    for source in sources:
        for part in parts(source, wanted, layout):
            names = [name for name in wanted if name in part.table.column_names]
            yield part._replace(table=part.table.select(names))


def _survey(
    sources: Sequence[str], wanted: Sequence[str], layout: RowLayout
) -> tuple[pa.Schema, list[tuple[str, int, bool]]]:
    """The columns of all rows together; and the name, the rows and the kind of each file."""
    schema: pa.Schema | None = None
    files: list[tuple[str, int, bool]] = []
    for part in _all(sources, wanted, layout):
        try:
            found = part.table.schema.remove_metadata()
            schema = found if schema is None else pa.unify_schemas([schema, found], promote_options="permissive")
        except MISMATCH as error:
            raise DataError(f"{part.place} does not go with the rows before it: {error}") from error
        rows = part.table.num_rows
        if files and files[-1][0] == part.path:
            files[-1] = (part.path, files[-1][1] + rows, part.lines)
        else:
            files.append((part.path, rows, part.lines))
    if schema is None:
        raise DataError(f"{', '.join(sources)} has no rows; each row is a task")
    return schema, files


def _as(part: RowPart, schema: pa.Schema) -> pa.Table:
    """Raises DataError."""
    try:
        return pa.concat_tables([schema.empty_table(), part.table], promote_options="permissive").cast(schema)
    except MISMATCH as error:
        raise DataError(f"{part.place} does not go with the other rows: {error}") from error
