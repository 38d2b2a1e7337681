"""Reads the rows of JSON files: one object per line, or one list of objects. Each value keeps its JSON type."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.data.layout import RowLayout, value_at
from asyncrl.data.recognised import lacking, recognised
from asyncrl.data.sendable import check_depth
from asyncrl.errors import DataError, WireError

JSON_SUFFIXES = (".jsonl", ".json")
HEAD_BYTES = 1024


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows in order. Raises DataError: a line or row is damaged (then the error names it), or the file has no
    rows."""
    count = 0
    # Arrow's JSON reader is not used: it would turn texts into dates and integers into decimals, and its errors name no
    # line.
    for row in _lines(path) if has_lines(path) else _list(path):
        yield row
        count += 1
    if not count:
        raise DataError(f"{path} has no rows; each row is a task")


class WantedRows:
    """The columns `required` and `optional` of each row, in verl's layout.

    `columns` has the wanted columns that the rows so far had. Iteration raises DataError: a row cannot be read or sent,
    or, after the last row, a required column was in no row.
    """

    def __init__(self, path: Path, required: Sequence[str], optional: Sequence[str], layout: RowLayout) -> None:
        self._path, self._required, self._wanted, self._layout = path, required, (*required, *optional), layout
        self.columns: set[str] = set()

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        names: set[str] = set()
        missing = set(self._layout.columns.values())
        first, unit = (1, "line") if has_lines(self._path) else (0, "row")
        for number, row in enumerate(json_rows(self._path), first):
            names.update(row)
            missing -= {path for path in missing if value_at(row, path) is not None}
            layout = self._layout_of(row)
            given = layout.row(row, self._path.stem)
            values = {name: given[name] for name in self._wanted if name in given}
            self.columns.update(values)
            try:
                check_depth(values)
            except (WireError, ValueError) as error:
                raise DataError(f"{self._path}: {unit} {number} cannot be sent: {error}; mend or drop it") from error
            yield values
        self._layout.check(str(self._path), names, lambda path: path not in missing)
        if missing_columns := [name for name in self._required if name not in self.columns]:
            raise lacking(str(self._path), missing_columns, names, self._layout)

    def _layout_of(self, row: Mapping[str, Any]) -> RowLayout:
        def has_text(name: str) -> bool:
            return isinstance(row.get(name), str)

        return recognised(self._layout, str(self._path), row.keys(), self._wanted, has_text)


def has_lines(path: Path) -> bool:
    """True if each line of a file is a row. Raises DataError."""
    if path.suffix not in JSON_SUFFIXES:
        return False
    try:
        with path.open("rb") as file:
            return path.suffix == ".jsonl" or not _text(file.read(HEAD_BYTES)).lstrip().startswith(b"[")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _list(path: Path) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(_text(path.read_bytes()), type=list[dict[str, Any]])
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is no JSON list of objects: {error}; write one object a line") from error


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    decoder, number = msgspec.json.Decoder(dict[str, Any]), 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    raise DataError(f"{path}: line {number} is empty; delete it, so that every line is a row")
                yield decoder.decode(line if number > 1 else _text(line))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: line {number} is no JSON object: {error}; write one object a line") from error


def _text(content: bytes) -> bytes:
    """The content without the byte order mark that some programs on Windows write."""
    return content.removeprefix(BOM_UTF8)
