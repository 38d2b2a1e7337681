"""Reads the rows of a published data set, and names the file and the row number of each."""

from __future__ import annotations

import json
import math
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.data.json_rows import JSON_SUFFIXES
from asyncrl.data.tables import SUFFIXES, find_files
from asyncrl.errors import DataError

Row = dict[str, Any]


def published_rows(source: str) -> Iterator[tuple[str, Row]]:
    """The position of each row, such as `a.jsonl: line 3`, and its values. Raises DataError.

    Files may be Parquet, JSON lines, JSON lists, or single JSON objects. `source` means the same as in `data.train`,
    but the folders within a folder are searched, too.
    """
    for path in _files(source):
        if path.suffix in JSON_SUFFIXES:
            yield from _json_rows(path)
            continue
        try:
            with pq.ParquetFile(path) as file:
                rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
                yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def text_of(value: Any) -> str:
    """A text or a finite number as text, without white space around it; empty for other values."""
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return str(value).strip() if isinstance(value, str | int | float) else ""


def json_of(value: Any) -> Any:
    """Return the value of JSON text. Other values are returned unchanged.

    Raises ValueError: the text is not JSON, or has nan or infinity; RecursionError: it is nested too deeply.
    """
    return json.loads(value, parse_constant=_no_number, parse_float=_finite) if isinstance(value, str) else value


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(number: str) -> float:
    if not math.isfinite(read := float(number)):
        raise ValueError(f"{number} is too large")
    return read


def _files(source: str) -> list[Path]:
    folder = Path(source)
    if not folder.is_dir():
        return find_files(source)
    if (folder / "dataset_dict.json").is_file() or ((folder / "state.json").is_file() and any(folder.glob("*.arrow"))):
        raise DataError(
            f"{folder} was written by save_to_disk of datasets; write it with to_parquet or to_json instead"
        )
    files = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if found := sorted(files, key=_in_order):
        return found
    raise DataError(f"{folder} has no file that ends in {', '.join(SUFFIXES)}")


def _in_order(path: Path) -> tuple[str, int, str]:
    """A sort key by which 2.json comes before 10.json."""
    return str(path.parent), int(path.stem) if path.stem.isdecimal() else -1, path.name


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        content = path.read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    number = 1
    try:
        if path.suffix == ".json":
            try:
                whole = msgspec.json.decode(content, type=Row | list[Row])
            except msgspec.DecodeError as error:
                # A file that is not one JSON value may have JSON lines, which are read below. None begins a list.
                if content.lstrip().startswith(b"["):
                    raise DataError(f"{path} is not a list of JSON objects: {error}") from error
            else:
                rows = whole if isinstance(whole, list) else [whole]
                yield from ((f"{path}: row {row}", values) for row, values in enumerate(rows))
                return
        for number, line in enumerate(content.splitlines(), 1):
            if not line.strip():
                raise DataError(f"{path}: line {number} is empty; delete it, so that every line is a row")
            yield f"{path}: line {number}", msgspec.json.decode(line, type=Row)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: line {number} is not a JSON object: {error}") from error
