"""Reads rows of Parquet and JSON files, of folders that Hugging Face `datasets` wrote, and of data sets on the hub.

A source names one file, a folder of files or a pattern.

Files may have different columns and types: each row keeps the values of its file. The files of a folder or pattern are
sorted by name.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.data.json_rows import JSON_SUFFIXES, WantedRows, has_lines, names_of
from asyncrl.data.layout import AS_THEY_ARE, RowLayout
from asyncrl.data.recognised import lacking, of_schema
from asyncrl.data.rows import PACKED, ROWS_AT_ONCE, Rows, TableFile, packed, parts_of
from asyncrl.errors import DataError

T = TypeVar("T")

SUFFIXES = (".parquet", *JSON_SUFFIXES)
OTHER_TABLES = (".csv", ".tsv", ".xlsx", ".txt")
HUB = "hf://datasets/"
NAMED = ("hub:", "reasoning-gym:")
"""The prefixes of sources that are not files."""
HUB_FORM = f"{HUB}OWNER/NAME, {HUB}OWNER/NAME@REVISION or either with /FOLDER, /FILE or /PATTERN after it"


def read_rows(
    sources: Sequence[str | Path],
    required: Sequence[str],
    optional: Sequence[str] = (),
    layout: RowLayout = AS_THEY_ARE,
) -> Rows:
    """The rows of all `sources`, with the columns `required` and `optional`.

    Raises DataError, which names the file: it does not exist, cannot be read or lacks a required column.
    """
    paths = [path for source in sources for path in find_files(str(source))]
    read = [_read(path, required, optional, layout) for path in paths]
    starts = accumulate((len(table) for table, _ in read), initial=0)
    files = [
        TableFile(path, first, len(table), has_lines(path))
        for path, (table, _), first in zip(paths, read, starts, strict=False)
    ]
    columns = frozenset(name for _, names in read for name in names)
    return Rows(parts_of(table for table, _ in read), files, columns)


def in_parts(rows: Iterable[T]) -> Iterator[list[T]]:
    """Lists of ROWS_AT_ONCE rows; the last list may be shorter."""
    left = iter(rows)
    while part := list(islice(left, ROWS_AT_ONCE)):
        yield part


def find_files(source: str) -> list[Path]:
    """The files of a source. A folder that `datasets` wrote counts as one file. Raises DataError."""
    if source.startswith(NAMED):
        raise DataError(f"{source} is not a file; only data.train, data.eval and `asyncrl evaluate --data` take it")
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
        raise DataError(f"{pattern} is not a pattern: {error}") from error
    if not found:
        raise DataError(f"{pattern}: the file does not exist, and no file matches it as a pattern")
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
    raise DataError(f"{folder} has no file that ends in {', '.join(SUFFIXES)}, and is not a folder of `datasets`{hint}")


def _files_of_hub(source: str) -> list[Path]:
    """The files of a data set on the hub. Raises DataError: it is neither on the hub nor in the local cache."""
    # The import is here, not at the top, because the replay process loads this module too, and must restart quickly.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    owner, _, rest = source.removeprefix(HUB).partition("/")
    named, _, within = rest.partition("/")
    name, _, revision = named.partition("@")
    if not source.startswith(HUB) or not owner or not name:
        raise DataError(f"{source}: a data set of the hub is named {HUB_FORM}")
    within = within.strip("/")
    if ".." in Path(within).parts:
        raise DataError(f"{source}: {within} is outside of the data set; a data set of the hub is named {HUB_FORM}")
    try:
        folder = snapshot_download(
            f"{owner}/{name}",
            repo_type="dataset",
            revision=revision or None,
            allow_patterns=[f"{within}/*", within] if within else [f"*{suffix}" for suffix in SUFFIXES],
            ignore_patterns=[f"{within}/*/*"] if within else ["*/*"],
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise DataError(f"{source} cannot be loaded, and is not in the local cache: {error}") from error
    path = Path(folder) / within
    if not (path.exists() or glob.has_magic(within)):
        raise DataError(f"{source}: the data set has no file or folder {within}")
    if not within and not any(each.suffix in SUFFIXES for each in path.iterdir()):
        raise DataError(f"{source}: its files are in folders; name one, such as {source}/data")
    return find_files(str(path))


def _read(
    path: Path, required: Sequence[str], optional: Sequence[str], layout: RowLayout
) -> tuple[pa.Table, Collection[str]]:
    """The rows of a file, and the names of the wanted columns that it has."""
    wanted = (*required, *optional)
    if path.suffix in JSON_SUFFIXES:
        rows = WantedRows(path, required, optional, layout)
        packs = [packed(part) for part in in_parts(rows)]
        return pa.table({PACKED: pa.chunked_array(packs, pa.large_binary())}), rows.columns
    schema = schema_of(path)
    layout = of_schema(layout, str(path), schema, wanted)
    table = layout.applied(_table(path, layout.read(wanted, schema.names)), str(path), path.stem)
    if missing := [name for name in required if name not in table.column_names]:
        raise lacking(str(path), missing, schema.names, layout)
    table = table.select(layout.kept(wanted, table.column_names))
    return table.replace_schema_metadata(None), table.column_names


def schema_of(path: Path) -> pa.Schema:
    """The columns of a Parquet file, or of a folder of `datasets`, with their types. Raises DataError."""
    if path.is_dir():
        return table_of_datasets(path).schema
    try:
        if path.is_file() and path.suffix in OTHER_TABLES:
            raise DataError(
                f"{path}: files that end in {path.suffix} are not read, only {', '.join(SUFFIXES)}; convert it, for "
                "example with pandas"
            )
        return pq.read_schema(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def column_names(path: Path) -> list[str]:
    """The names of all columns of a file, or of a folder of `datasets`. Raises DataError."""
    return names_of(path) if path.suffix in JSON_SUFFIXES else list(schema_of(path).names)


def _table(path: Path, columns: Sequence[str]) -> pa.Table:
    if path.is_dir():
        return table_of_datasets(path)
    try:
        names = pq.read_schema(path).names
        check_columns(path, names)
        return pq.read_table(path, columns=[name for name in columns if name in names])
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def check_columns(path: Path, names: Sequence[str]) -> None:
    """Raises DataError: two columns have the same name."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path} has more than one column {', '.join(twice)}; rename or drop the others")


def table_of_datasets(folder: Path) -> pa.Table:
    """The rows of a folder that `Dataset.save_to_disk` of Hugging Face `datasets` wrote. Raises DataError."""
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        if state.get("_indices_data_files"):
            raise DataError(f"{folder} was written by an old version of `datasets`; load it and save it with a new one")
        streams = [folder / each["filename"] for each in state["_data_files"]]
        tables = [pa.ipc.open_stream(pa.memory_map(str(stream))).read_all() for stream in streams]
        return pa.concat_tables(tables)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, pa.ArrowInvalid) as error:
        raise DataError(f"{folder} cannot be read as a folder of `datasets`: {error}") from error
