"""Where rows of tasks come from, part by part: files, data sets of the hub by `datasets`, and programs that make tasks.

A source of a run is a text. `hub:OWNER/NAME?split=train` is read with Hugging Face `datasets`, which takes every format
that a data set may have; `reasoning-gym:NAME?size=1000` makes tasks; anything else names files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.data.converters import reasoning_gym
from asyncrl.data.layout import RowLayout
from asyncrl.data.query import SourceQuery
from asyncrl.data.tables import (
    JSON_SUFFIXES,
    NAMED,
    ROWS_AT_ONCE,
    check_columns,
    find_files,
    has_lines,
    json_tables,
    table_of_datasets,
)
from asyncrl.data.writing import row_of
from asyncrl.errors import DataError
from asyncrl.text import reason_of
from asyncrl.types import Task

HUB = "hub:"
HUB_FORM = f"{HUB}OWNER/NAME?split=train, with &config=NAME and &revision=COMMIT where the data set needs them"
HUB_KEYS = ("split", "config", "revision")
_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class RowPart(NamedTuple):
    """Rows of one source in a row. `place` names what they come from."""

    place: str
    path: str
    lines: bool
    table: pa.Table


def is_named(source: str) -> bool:
    """Whether a source names no files, so that a start must write its rows before roles can read them."""
    return source.startswith(NAMED)


def parts(source: str, wanted: Sequence[str], layout: RowLayout) -> Iterator[RowPart]:
    """The rows of a source in verl's layout, in order, at most ROWS_AT_ONCE rows a part or as many as its file has
    together. Raises DataError, which names the source."""
    if source.startswith(HUB):
        yield from _of_hub(source, wanted, layout)
        return
    if source.startswith(reasoning_gym.KIND):
        yield from _of_tasks(source, reasoning_gym.tasks(source))
        return
    for path in find_files(source):
        for table in _tables(path, layout.read(wanted)):
            yield RowPart(str(path), str(path), has_lines(path), layout.applied(table, str(path), path.stem))


def _of_tasks(source: str, tasks: Iterator[Task]) -> Iterator[RowPart]:
    """Tasks that a program makes, which are in verl's layout."""
    numbered = enumerate(tasks)
    while rows := [row_of(number, task) for number, task in islice(numbered, ROWS_AT_ONCE)]:
        yield RowPart(source, source, False, pa.Table.from_pylist(rows))


def _tables(path: Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    if path.is_dir():
        yield from _cut(table_of_datasets(path), columns)
        return
    if path.suffix in JSON_SUFFIXES:
        yield from (table for _, table in json_tables(path))
        return
    try:
        with pq.ParquetFile(path) as file:
            check_columns(path, file.schema_arrow.names)
            names = [each for each in columns if each in file.schema_arrow.names]
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=names):
                yield pa.Table.from_batches([batch])
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def _cut(table: pa.Table, columns: Sequence[str]) -> Iterator[pa.Table]:
    table = table.select([each for each in columns if each in table.column_names])
    for batch in table.to_batches(ROWS_AT_ONCE):
        yield pa.Table.from_batches([batch])


def _of_hub(source: str, wanted: Sequence[str], layout: RowLayout) -> Iterator[RowPart]:
    query = SourceQuery.of(source, HUB_FORM)
    if unknown := sorted(set(query.values) - set(HUB_KEYS)):
        raise DataError(f"{source}: there is no {', '.join(unknown)}; write {HUB_FORM}")
    if "split" not in query.values:
        raise DataError(f"{source} names no split; write {HUB_FORM}")
    _check_name(source, query.name)
    rows = _loaded(source, query)
    columns = [each for each in layout.read(wanted) if each in rows.column_names]
    for table in rows.select_columns(columns).with_format("arrow").iter(ROWS_AT_ONCE):
        yield RowPart(source, f"{query.name}/{query.values['split']}", False, layout.applied(table, source, query.name))


def _check_name(source: str, name: str) -> None:
    """Raises DataError: `datasets` would read something that is not on the hub. A folder of this machine is named by
    its whole path."""
    path = Path(name)
    if path.is_absolute() and ".." not in path.parts:
        return
    if not _ON_HUB.fullmatch(name) or ".." in path.parts:
        raise DataError(f"{source}: {name} is no OWNER/NAME; write {HUB_FORM}")
    if path.exists():
        raise DataError(f"{source}: there is a folder {name} here, which would be read; name it {path.resolve()}")


def _loaded(source: str, query: SourceQuery) -> Any:
    """The split, which `datasets` keeps in its cache. Raises DataError."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(f"{source} needs Hugging Face datasets: pip install 'asyncrl[datasets]'") from error
    config, revision = query.values.get("config"), query.values.get("revision")
    try:
        return datasets.load_dataset(query.name, config, split=query.values["split"], revision=revision)
    except Exception as error:
        raise DataError(
            f"{source} cannot be loaded: {reason_of(error)}; check its name, HF_TOKEN and the network, or run "
            f"`hf download --repo-type dataset {query.name} --local-dir FOLDER` where there is one, and name its files"
        ) from error
