"""Files of rows as one table: Parquet, JSON lines, folders and patterns of these, folders of Hugging Face `datasets`
and data sets of the Hugging Face hub.

The columns of several files are united: a column or a field that a file lacks is null in its rows. Only the types of a
column must go together. The files of a folder or a pattern come in the order of their names.
"""

from __future__ import annotations

import glob
import json
from bisect import bisect_left, bisect_right
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.data.layout import AS_THEY_ARE, RowLayout
from asyncrl.errors import DataError

JSON_SUFFIXES = (".jsonl", ".json")
SUFFIXES = (".parquet", *JSON_SUFFIXES)
HUB = "hf://datasets/"
NAMED = ("hub:", "reasoning-gym:")
"""How a source begins that names no files."""
HUB_FORM = f"{HUB}OWNER/NAME, {HUB}OWNER/NAME@REVISION or either with /FOLDER, /FILE or /PATTERN behind it"
ROWS_AT_ONCE = 10_000
HEAD_BYTES = 1024
MISMATCH = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError)
"""What pyarrow raises for values that no column has room for beside others."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """One of the files, or one folder of `datasets`: its rows have the numbers `first` to `first + rows - 1`."""

    path: Path
    first: int
    rows: int
    lines: bool

    def place(self, row: int) -> str:
        """Where the row with the number `row` is, in words: lines are counted from 1, and other rows from 0."""
        return f"{self.path}: {'line' if self.lines else 'row'} {row - self.first + self.lines}"


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of all files, in order. `made` is the file that a start made of them, where it did."""

    table: pa.Table
    files: Sequence[TableFile]
    made: Path | None = None

    def file_of(self, row: int) -> TableFile:
        return self.files[bisect_right(self.files, row, key=lambda file: file.first) - 1]


def read_rows(
    sources: Sequence[str | Path],
    required: Sequence[str],
    optional: Sequence[str] = (),
    layout: RowLayout = AS_THEY_ARE,
) -> Rows:
    """The columns `required` and `optional` of all `sources`; a column that no file has is left out.

    Raises DataError, which names the file that is not there, cannot be read, lacks a required column or does not go
    with the others.
    """
    paths = [path for source in sources for path in find_files(str(source))]
    tables = [_columns(path, required, optional, layout) for path in paths]
    starts = accumulate((table.num_rows for table in tables), initial=0)
    files = [
        TableFile(path, first, table.num_rows, has_lines(path))
        for path, table, first in zip(paths, tables, starts, strict=False)
    ]
    return Rows(united(list(map(str, paths)), tables), files)


def find_files(source: str) -> list[Path]:
    """The files that a source stands for. A folder that `datasets` wrote is one of them itself. Raises DataError."""
    if source.startswith(NAMED):
        raise DataError(f"{source} names no files; data.train, data.eval and `asyncrl evaluate --data` take such names")
    if source.startswith("hf://"):
        return _files_of_hub(source)
    if glob.has_magic(source) and not Path(source).exists():
        return _matching(source)
    return _files_in(Path(source)) if Path(source).is_dir() else [Path(source)]


def _matching(pattern: str) -> list[Path]:
    path = Path(pattern)
    try:
        found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    except ValueError as error:
        raise DataError(f"{pattern} is no pattern: {error}") from error
    if not found:
        raise DataError(f"{pattern}: there is no such file, and as a pattern it fits none")
    return found


def _files_in(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(str(state.parent) for state in folder.glob("*/state.json"))
        raise DataError(f"{folder} holds several splits: name the folder of one, such as {' or '.join(splits)}")
    if (folder / "state.json").is_file():
        return [folder]
    if found := sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file()):
        return found
    below = sorted({str(path.parent) for path in folder.rglob("*") if path.suffix in SUFFIXES})
    hint = f"; name a folder within it, such as {below[0]}" if below else ""
    raise DataError(f"{folder} has no file that ends in {', '.join(SUFFIXES)}, and is no folder of `datasets`{hint}")


def _files_of_hub(source: str) -> list[Path]:
    """Raises DataError: the data set is neither on the hub nor in the hub's cache on this machine."""
    # Only where it is needed: a replay must be up again in a moment.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    owner, _, rest = source.removeprefix(HUB).partition("/")
    named, _, within = rest.partition("/")
    name, _, revision = named.partition("@")
    if not source.startswith(HUB) or not owner or not name:
        raise DataError(f"{source}: a data set of the hub is named {HUB_FORM}")
    within = within.strip("/")
    if ".." in Path(within).parts:
        raise DataError(f"{source}: {within} leads out of the data set; a data set of the hub is named {HUB_FORM}")
    try:
        folder = snapshot_download(
            f"{owner}/{name}",
            repo_type="dataset",
            revision=revision or None,
            allow_patterns=[f"{within}/*", within] if within else [f"*{suffix}" for suffix in SUFFIXES],
            ignore_patterns=[f"{within}/*/*"] if within else ["*/*"],
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise DataError(f"{source} can neither be loaded nor is it in the hub's cache: {error}") from error
    path = Path(folder) / within
    if not (path.exists() or glob.has_magic(within)):
        raise DataError(f"{source}: the data set has nothing that is named {within}")
    if not within and not any(each.suffix in SUFFIXES for each in path.iterdir()):
        raise DataError(f"{source}: its files are in folders; name one, such as {source}/data")
    return find_files(str(path))


def _columns(path: Path, required: Sequence[str], optional: Sequence[str], layout: RowLayout) -> pa.Table:
    table = layout.applied(_table(path, layout.read([*required, *optional])), str(path), path.stem)
    if missing := [name for name in required if name not in table.column_names]:
        names = _names_in(path) or table.column_names
        raise DataError(f"{path} has no column {', '.join(missing)}; it has {', '.join(sorted(names))}")
    return table.select([name for name in (*required, *optional) if name in table.column_names])


def _table(path: Path, columns: Sequence[str]) -> pa.Table:
    if path.suffix in JSON_SUFFIXES:
        return _table_of_json(path)
    if path.is_dir():
        return table_of_datasets(path)
    try:
        names = pq.read_schema(path).names
        check_columns(path, names)
        return pq.read_table(path, columns=[name for name in columns if name in names])
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def check_columns(path: Path, names: Sequence[str]) -> None:
    """Raises DataError: two columns have one name."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path} has more than one column {', '.join(twice)}; rename or drop one")


def _names_in(path: Path) -> list[str]:
    """All columns of a Parquet file, of which only the wanted ones are read."""
    return [] if path.is_dir() or path.suffix in JSON_SUFFIXES else list(pq.read_schema(path).names)


def table_of_datasets(folder: Path) -> pa.Table:
    """A folder that `Dataset.save_to_disk` of Hugging Face `datasets` wrote: streams of Arrow, named by state.json."""
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        if state.get("_indices_data_files"):
            raise DataError(f"{folder} was written by an old version of `datasets`; load it and save it with a new one")
        streams = [folder / each["filename"] for each in state["_data_files"]]
        tables = [pa.ipc.open_stream(pa.memory_map(str(stream))).read_all() for stream in streams]
        return pa.concat_tables(tables)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, pa.ArrowInvalid) as error:
        raise DataError(f"{folder} cannot be read as a folder of `datasets`: {error}") from error


def _table_of_json(path: Path) -> pa.Table:
    """All rows of a JSON file. Raises DataError, which names the line or the row."""
    names, tables = zip(*json_tables(path), strict=True)
    return united(names, tables)


def json_tables(path: Path) -> Iterator[tuple[str, pa.Table]]:
    """One JSON object a line, or one list of them, in parts with their places. Raises DataError, which names the line
    or the row, or says that there is none."""
    # pyarrow's own reader would make dates of texts that look like dates, and names no line.
    unit, count = "line" if has_lines(path) else "row", 0
    for first, rows in _batches(path):
        yield f"{path}, {unit}s {first} to {first + len(rows) - 1}", _table_of(f"{path}: {unit}", first, rows)
        count += len(rows)
    if not count:
        raise DataError(f"{path} has no rows; each row is a task")


def has_lines(path: Path) -> bool:
    """Whether the rows of a file are the lines of a text."""
    if path.suffix not in JSON_SUFFIXES:
        return False
    try:
        with path.open("rb") as file:
            return path.suffix == ".jsonl" or not _text(file.read(HEAD_BYTES)).lstrip().startswith(b"[")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _batches(path: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The rows in parts, each with the number of its first line or row."""
    number, rows = 0, []
    try:
        if not has_lines(path):
            yield 0, msgspec.json.decode(_text(path.read_bytes()), type=list[dict[str, Any]])
            return
        decoder = msgspec.json.Decoder(dict[str, Any])
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    raise DataError(f"{path}: line {number} is empty; delete it, so that every line is a row")
                rows.append(decoder.decode(line if number > 1 else _text(line)))
                if len(rows) == ROWS_AT_ONCE:
                    yield number - len(rows) + 1, rows
                    rows = []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        where = f"{path}: line {number} is no JSON object" if number else f"{path} is no JSON list of objects"
        raise DataError(f"{where}: {error}; write one object a line") from error
    if rows:
        yield number - len(rows) + 1, rows


def _text(content: bytes) -> bytes:
    """Without the mark that some programs on Windows write before UTF-8."""
    return content.removeprefix(BOM_UTF8)


def _table_of(unit: str, first: int, rows: list[dict[str, Any]]) -> pa.Table:
    try:
        return _arrow(rows)
    except MISMATCH as error:
        last = bisect_left(range(len(rows)), True, key=lambda row: not _goes(rows[: row + 1]))
        raise DataError(
            f"{unit} {first + last} does not go with those before it, which have other types: {error}"
        ) from error


def _goes(rows: list[dict[str, Any]]) -> bool:
    try:
        _arrow(rows)
    except MISMATCH:
        return False
    return True


def _arrow(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_struct_array(pa.array(rows)) if rows else pa.table({})


def united(names: Sequence[str], tables: Sequence[pa.Table]) -> pa.Table:
    """All rows in one table. Raises DataError, which names the first table that does not go with those before it."""
    if len(tables) == 1:
        return tables[0]
    schema = tables[0].schema
    for name, table in zip(names, tables, strict=True):
        try:
            schema = pa.unify_schemas([schema, table.schema], promote_options="permissive")
        except MISMATCH as error:
            raise DataError(f"{name} does not go with the rows before it: {error}") from error
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except MISMATCH as error:
        raise DataError(f"{names[0]} to {names[-1]} cannot become one table: {error}") from error
