"""Reads the steps and evaluations of verl from its console, while verl runs.

verl prints the metrics of a step as `step:3 - timing_s/gen:1.5 - ...`, after a prefix that Ray adds, and without their
time. So a row has the time at which its line was read. verl's fully asynchronous trainer prints a step in several such
lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"\bstep:([0-9]+) - (.+)")
_VALUE = re.compile(r"(?:np\.\w+\()?([-+]?(?:[0-9][0-9.]*(?:e[-+]?[0-9]+)?|inf|nan))\)?", re.IGNORECASE)
_ACCURACY = re.compile(r"val-core/.*/mean@1")
SECONDS = "timing_s/"


class Row(NamedTuple):
    """The metrics of one line, the step that they belong to, and the time at which the line was read, in seconds since
    1970."""

    time: float
    step: int
    values: Mapping[str, float]

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase of a step, and of the whole `step`. Empty for a line of something else."""
        if f"{SECONDS}step" not in self.values:
            return {}
        # The fully asynchronous trainer writes the prefix of one of its phases twice.
        return {key.replace(SECONDS, ""): value for key, value in self.values.items() if key.startswith(SECONDS)}

    @property
    def accuracy(self) -> float | None:
        """The mean outcome on held-out tasks, if the line has an evaluation."""
        return next((value for key, value in self.values.items() if _ACCURACY.fullmatch(key)), None)


class Console:
    """The rows in a log that verl still writes. `clock` gives seconds since 1970."""

    def __init__(self, log: Path, clock: Callable[[], float]) -> None:
        self.rows: list[Row] = []
        self._log = log
        self._clock = clock
        self._read = 0

    def read(self) -> None:
        """Add the rows of all lines that were completed since the last call."""
        if not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        found = (row_of(line, self._clock()) for line in whole.decode(errors="replace").splitlines())
        self.rows += [row for row in found if row is not None]


def row_of(line: str, time: float) -> Row | None:
    """The row of a line that was read at `time`; None: the line has no metrics."""
    found = _LINE.search(line)
    if found is None:
        return None
    pairs = (part.rpartition(":") for part in found[2].split(" - "))
    numbers = ((key, _VALUE.fullmatch(value.strip())) for key, _, value in pairs)
    return Row(time, int(found[1]), {key: float(number[1]) for key, number in numbers if number is not None})
