"""Reads sources of tasks in parts: files, data sets of the hub, and programs that make tasks.

A source is a text. `hub:OWNER/NAME?split=train` is read by Hugging Face `datasets`, which supports every format of a
data set. `reasoning-gym:NAME?size=1000` makes tasks. Any other text names files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.data.converters import reasoning_gym
from asyncrl.data.json_rows import JSON_SUFFIXES, WantedRows, has_lines
from asyncrl.data.layout import AS_THEY_ARE, RowLayout
from asyncrl.data.query import SourceQuery
from asyncrl.data.recognised import lacking, of_schema
from asyncrl.data.row_tasks import UNUSABLE, unusable
from asyncrl.data.rows import ROWS_AT_ONCE, arrow_values
from asyncrl.data.tables import NAMED, check_columns, find_files, in_parts, schema_of, table_of_datasets
from asyncrl.data.writing import row_of
from asyncrl.errors import DataError
from asyncrl.text import reason_of
from asyncrl.types import Task

HUB = "hub:"
HUB_FORM = f"{HUB}OWNER/NAME?split=train, with &config=NAME and &revision=COMMIT where the data set needs them"
HUB_KEYS = ("split", "config", "revision")
_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class RowPart(NamedTuple):
    """Consecutive rows of one source.

    - `path`: the name of the file, or of the source
    - `lines`: true if each row is a line of a text file
    - `first`: the index of the part's first row in the file or source
    """

    path: str
    lines: bool
    first: int
    rows: Sequence[Mapping[str, Any]]


def is_named(source: str) -> bool:
    """True if a source does not name files. Its rows must then be written into the run's folder before roles can read
    them."""
    return source.startswith(NAMED)


def parts(
    source: str, required: Sequence[str], optional: Sequence[str] = (), layout: RowLayout = AS_THEY_ARE
) -> Iterator[RowPart]:
    """The rows of a source in verl's layout, in order, at most ROWS_AT_ONCE rows per part.

    Raises DataError, which names the source.
    """
    if source.startswith(HUB):
        yield from _of_hub(source, required, optional, layout)
        return
    if source.startswith(reasoning_gym.KIND):
        yield from of_tasks(source, reasoning_gym.tasks(source))
        return
    for path in find_files(source):
        if path.suffix in JSON_SUFFIXES:
            yield from _numbered(str(path), has_lines(path), in_parts(WantedRows(path, required, optional, layout)))
        else:
            wanted = (*required, *optional)
            schema = schema_of(path)
            found = of_schema(layout, str(path), schema, wanted)
            given = _batches(path, found.read(wanted, schema.names))
            tables = _applied(given, found, str(path), path.stem)
            yield from _of_tables(str(path), tables, required, wanted, found, schema.names)


def of_tasks(source: str, tasks: Iterable[Task]) -> Iterator[RowPart]:
    """Make rows in verl's layout from tasks that a program makes."""
    return _numbered(source, False, in_parts(row_of(number, task) for number, task in enumerate(tasks)))


def _numbered(path: str, lines: bool, given: Iterable[Sequence[Mapping[str, Any]]]) -> Iterator[RowPart]:
    first = 0
    for rows in given:
        yield RowPart(path, lines, first, rows)
        first += len(rows)


def _applied(tables: Iterable[pa.Table], layout: RowLayout, place: str, name: str) -> Iterator[pa.Table]:
    first = 0
    for table in tables:
        yield layout.applied(table, place, name, first)
        first += len(table)


def _of_tables(
    path: str,
    tables: Iterable[pa.Table],
    required: Sequence[str],
    wanted: Sequence[str],
    layout: RowLayout,
    names: Sequence[str],
) -> Iterator[RowPart]:
    """The rows of `tables`, which are parts of a file with the columns `names`."""
    first = 0
    for table in tables:
        if missing := [name for name in required if name not in table.column_names]:
            raise lacking(path, missing, names, layout)
        known = table.select(layout.kept(wanted, table.column_names))
        yield RowPart(path, False, first, list(_values(known, path, first)))
        first += len(table)


def _values(table: pa.Table, path: str, first: int) -> Iterator[Mapping[str, Any]]:
    """The values of rows. Raises DataError, which names a row whose values Python cannot represent."""
    try:
        yield from list(arrow_values(table))
    except UNUSABLE:
        for row in range(len(table)):
            try:
                list(arrow_values(table.slice(row, 1)))
            except UNUSABLE as error:
                raise unusable(f"{path}: row {first + row}", error) from error
        raise


def _batches(path: Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    if path.is_dir():
        table = table_of_datasets(path)
        known = table.select([each for each in columns if each in table.column_names])
        yield from (pa.Table.from_batches([batch]) for batch in known.to_batches(ROWS_AT_ONCE))
        return
    try:
        with pq.ParquetFile(path) as file:
            check_columns(path, file.schema_arrow.names)
            names = [each for each in columns if each in file.schema_arrow.names]
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=names):
                yield pa.Table.from_batches([batch])
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def _of_hub(source: str, required: Sequence[str], optional: Sequence[str], layout: RowLayout) -> Iterator[RowPart]:
    query = SourceQuery.of(source, HUB_FORM)
    if unknown := sorted(set(query.values) - set(HUB_KEYS)):
        raise DataError(f"{source}: unknown key {', '.join(unknown)}; write {HUB_FORM}")
    if "split" not in query.values:
        raise DataError(f"{source} names no split; write {HUB_FORM}")
    _check_name(source, query.name)
    rows = _loaded(source, query)
    wanted = (*required, *optional)
    found = of_schema(layout, source, rows.features.arrow_schema, wanted)
    given = rows.select_columns(found.read(wanted, rows.column_names)).with_format("arrow").iter(ROWS_AT_ONCE)
    tables = _applied(given, found, source, query.name)
    yield from _of_tables(f"{query.name}/{query.values['split']}", tables, required, wanted, found, rows.column_names)


def _check_name(source: str, name: str) -> None:
    """Raises DataError: `name` is neither OWNER/NAME nor an absolute path, or a local folder has this name.

    `datasets` would read that folder instead of the hub.
    """
    path = Path(name)
    if path.is_absolute() and ".." not in path.parts:
        return
    if not _ON_HUB.fullmatch(name) or ".." in path.parts:
        raise DataError(f"{source}: {name} is not OWNER/NAME; write {HUB_FORM}")
    if path.exists():
        raise DataError(f"{source}: the local folder {name} would be read; if you mean it, name it {path.resolve()}")


def _loaded(source: str, query: SourceQuery) -> Any:
    """The split, which `datasets` loads into its cache. Raises DataError."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{source} needs Hugging Face datasets: pip install 'asyncrl[datasets]' ({error})") from error
    config, revision = query.values.get("config"), query.values.get("revision")
    try:
        return datasets.load_dataset(query.name, config, split=query.values["split"], revision=revision)
    except Exception as error:
        raise DataError(
            f"{source} cannot be loaded: {reason_of(error)}; check its name, HF_TOKEN and the network, or run "
            f"`hf download --repo-type dataset {query.name} --local-dir FOLDER` on a machine with a network, and name "
            "its files"
        ) from error
