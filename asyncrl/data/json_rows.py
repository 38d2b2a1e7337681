"""Reads the rows of JSON files: one object per line, or one list of objects. Each value keeps its JSON type."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.data.layout import RowLayout, has_path
from asyncrl.data.recognised import lacking, recognised
from asyncrl.data.sendable import check_depth
from asyncrl.errors import DataError, WireError

JSON_SUFFIXES = (".jsonl", ".json")
HEAD_BYTES = 1024


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows in order. Raises DataError: a line or row is damaged (the message names it), or the file has no rows."""
    count = 0
    # Arrow's JSON reader is not used: it would turn texts into dates and integers into decimals, and its errors name no
    # line.
    for row in _lines(path) if has_lines(path) else _list(path):
        yield row
        count += 1
    if not count:
        raise DataError(f"{path} has no rows; each row is a task")


class WantedRows:
    """The columns `required` and `optional` of each row, in verl's layout. A row has null in a column that only other
    rows have.

    `columns` has the wanted columns of the rows that were read so far. Iteration raises DataError: a required column is
    in no row, or a row cannot be read or sent, or has no prompt or ground truth.
    """

    def __init__(self, path: Path, required: Sequence[str], optional: Sequence[str], layout: RowLayout) -> None:
        self._path, self._required, self._wanted, self._layout = path, required, (*required, *optional), layout
        self.columns: set[str] = set()

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        # The file is read twice, because only the names of all its columns show which of them are the prompt and the
        # ground truth.
        seen = _Seen.of(self._path, self._layout.columns.values())
        layout = self._layout_of(seen)
        nulls = dict.fromkeys(seen.names)
        made = layout.row(nulls, self._path.stem)
        if missing := [name for name in self._required if name not in made]:
            raise lacking(str(self._path), missing, seen.names, self._layout)
        first, unit = (1, "line") if has_lines(self._path) else (0, "row")
        for number, row in enumerate(json_rows(self._path), first):
            place = f"{self._path}: {unit} {number}"
            layout.check_row(row, place)
            given = layout.row(nulls | row, self._path.stem)
            values = {name: given[name] for name in layout.kept(self._wanted, given)}
            self.columns.update(values)
            try:
                check_depth(values)
            except (WireError, ValueError) as error:
                raise DataError(f"{place} cannot be sent: {error}; mend or drop it") from error
            yield values

    def _layout_of(self, seen: _Seen) -> RowLayout:
        self._layout.check(str(self._path), seen.names, seen.paths.__contains__)
        return recognised(self._layout, str(self._path), seen.names, self._wanted, seen.texts.__contains__)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The columns of a whole file.

    - `names`: the names of all columns, in the order in which they first occur
    - `texts`: the columns with a text in at least one row
    - `paths`: the paths that at least one row has, even if the value is null
    """

    names: Mapping[str, None]
    texts: Collection[str]
    paths: Collection[str]

    @classmethod
    def of(cls, path: Path, paths: Iterable[str]) -> _Seen:
        """Read all rows of the file. Raises DataError: it cannot be read."""
        names, texts, found, missing = dict[str, None](), set[str](), set[str](), set(paths)
        for row in json_rows(path):
            names |= dict.fromkeys(row)
            texts.update(name for name, value in row.items() if isinstance(value, str))
            found |= {each for each in missing if has_path(row, each)}
            missing -= found
        return cls(names, texts, found)


def names_of(path: Path) -> list[str]:
    """The names of all columns of a file, in the order in which they first occur. Raises DataError."""
    return list(_Seen.of(path, ()).names)


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
        raise DataError(f"{path} is not a JSON list of objects: {error}; write one object a line") from error


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
        raise DataError(f"{path}: line {number} is not a JSON object: {error}; write one object a line") from error


def _text(content: bytes) -> bytes:
    """The content without the byte order mark that some programs on Windows write."""
    return content.removeprefix(BOM_UTF8)
