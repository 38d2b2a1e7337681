"""Rows of a run's metrics files, evenly thinned out: a file of a million steps is not read whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

Row = dict[str, Any]

MOST_ROWS = 2000
WHOLE_BYTES = 16 << 20
"""A file of at most so many bytes is read whole."""


def thinned_rows(path: Path, most: int = MOST_ROWS) -> list[Row]:
    """At most `most` rows of a file of JSON lines in their order, evenly spread, with the first and the last of them.

    Lines that are no JSON objects are left out, such as one that is being written. An empty list: there is no file.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return []
    rows = list(_decoded(path.read_bytes().split(b"\n") if size <= WHOLE_BYTES else _some_lines(path, size, most)))
    return _spread(rows, most)


def _decoded(lines: Iterator[bytes] | Sequence[bytes]) -> Iterator[Row]:
    decoder = msgspec.json.Decoder()
    for line in lines:
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(row, dict):
            yield row


def _some_lines(path: Path, size: int, most: int) -> Iterator[bytes]:
    """The first lines that begin at or behind evenly spread positions, and the last line."""
    with path.open("rb") as file:
        end = -1
        for number in range(most - 1):
            position = size * number // (most - 1)
            if position <= end:
                continue
            file.seek(position)
            if position:
                file.readline()
            if not (line := file.readline()):
                break
            yield line
            end = file.tell()
        file.seek(max(end, size - (1 << 20)))
        yield file.read().rstrip(b"\n").rpartition(b"\n")[2]


def _spread(rows: Sequence[Row], most: int) -> list[Row]:
    if len(rows) <= most:
        return list(rows)
    return [rows[number * (len(rows) - 1) // (most - 1)] for number in range(most)]
