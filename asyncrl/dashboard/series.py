"""Reads the metrics files of a run as columns of numbers, for figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.observe.registry import describe
from asyncrl.runs.lines import LineFile, LineSpan, Row, finite
from asyncrl.runs.run import Run

READ_WHOLE = 2 << 20
"""A part of a file with at most this many bytes is shown row by row. Of a larger part, rows are sampled."""
CATALOGUE_ROWS = 48
"""The number of rows of a file that are read to find the names of its metrics. One row is not enough, since names such
as lag/7 are in few rows."""
LONGEST_TEXT = 2000
AXES = ("step", "time")
CURSOR = re.compile(r"([0-9]{1,20}):([0-9]{1,18})")
"""A cursor: a file's inode, and the offset up to which the file was read. Neither number has more digits."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part of a file to show.

    - `names`: names of metrics; a name such as lag/* means all names with this beginning
    - `points`: the maximum number of rows that are sampled from a large file
    - `after`: the cursor of an earlier answer, if only the rows after it are wanted; else empty
    - `first`, `last`: the times between which rows are wanted; `None` if all rows are wanted
    """

    names: Sequence[str]
    points: int = 1500
    after: str = ""
    first: float | None = None
    last: float | None = None


def read_series(run: Run, file: str, wanted: Wanted) -> dict[str, Any]:
    """The wanted columns of a role's metrics.

    - `step`, `time`: a number for each row that is shown
    - `columns`: lists of numbers by name, with `None` where a row lacks the number
    - `rows`: the number of rows in the wanted part, estimated if only some were read
    - `all`: true if all rows are shown
    - `reset`: true if the whole file was wanted, or if the cursor does not fit because the file was replaced
    - `cursor`: the cursor for the next request
    """
    with run.open_rows(file) as lines:
        if lines is None:
            return {"step": [], "time": [], "columns": {}, "rows": 0, "all": True, "reset": True, "cursor": ""}
        span, reset = _span(lines, wanted)
        shown_all = span.size <= READ_WHOLE
        rows = list(lines.rows(span)) if shown_all else lines.sampled(span, wanted.points)
        return {
            **{axis: [finite(row.get(axis)) for row in rows] for axis in AXES},
            "columns": {name: [finite(row.get(name)) for row in rows] for name in _matching(rows, wanted.names)},
            "rows": len(rows) if shown_all else lines.estimated_rows(span),
            "all": shown_all,
            "reset": reset,
            "cursor": f"{span.file}:{lines.whole.end}",
        }


def _span(lines: LineFile, wanted: Wanted) -> tuple[LineSpan, bool]:
    if wanted.first is not None and wanted.last is not None:
        return lines.between(wanted.first, wanted.last), False
    if cursor := CURSOR.fullmatch(wanted.after):
        file, end = map(int, cursor.groups())
        span = lines.since(file, end)
        return span, span.start < end
    return lines.whole, True


def _matching(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    exact = [name for name in names if not name.endswith("*")]
    begins = tuple(name[:-1] for name in names if name.endswith("*"))
    found = dict.fromkeys(name for row in rows for name in row if begins and name.startswith(begins))
    return list(dict.fromkeys([*exact, *found]))


def catalogue(run: Run) -> dict[str, dict[str, dict[str, Any]]]:
    """Each metric by file and name: its `newest` value, a number or the beginning of a text; and its `kind`, `unit` and
    `meaning`, if it is one of asyncrl's."""
    return {
        file: {name: {"newest": value, **_meaning(file, name)} for name, value in _newest(run, file).items()}
        for file in run.metrics_files()
    }


def _meaning(file: str, name: str) -> dict[str, str]:
    metric = describe(file, name)
    return {} if metric is None else {"kind": metric.kind, "unit": metric.unit, "meaning": metric.meaning}


def _newest(run: Run, file: str) -> dict[str, Any]:
    with run.open_rows(file) as lines:
        rows = lines.sampled(lines.whole, CATALOGUE_ROWS) if lines is not None else []
    newest: dict[str, Any] = {}
    for row in rows:
        newest.update(row)
    return {name: _plain(value) for name, value in newest.items() if name not in AXES}


def _plain(value: Any) -> float | str | None:
    return value[:LONGEST_TEXT] if isinstance(value, str) else finite(value)
