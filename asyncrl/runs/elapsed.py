"""Computes for how long a run has run: all of its starts together, without the pauses between them.

`environment.json` has the time of each start. A start lasts until the last row that any role wrote before the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from math import inf

from asyncrl.runs.environment import read_environments
from asyncrl.runs.lines import finite
from asyncrl.runs.run import Run


def elapsed_s(run: Run, now: float | None = None) -> float:
    """The seconds for which a run has run. `now` is the present time, in seconds since 1970, while the run is running;
    `None`: it has ended. 0 if nothing shows that it ever started."""
    begins = _starts(run) or _first_rows(run)
    if not begins:
        return 0.0
    until = _last_row(run, begins[-1], inf) if now is None else now
    return _of_ended(run, begins) + max(0.0, until - begins[-1])


def earlier_s(run: Run) -> float:
    """The seconds for which a run ran before its newest start."""
    return _of_ended(run, _starts(run))


def _starts(run: Run) -> list[float]:
    return [each.time for each in read_environments(run.folder)]


def _of_ended(run: Run, begins: Sequence[float]) -> float:
    return sum(_last_row(run, begin, end) - begin for begin, end in pairwise(begins))


def _first_rows(run: Run) -> list[float]:
    """The time of the first row of all, for a run whose starts were not recorded; empty without rows."""
    times = [row["time"] for role in run.roles() for row in islice(run.rows(role), 1)]
    return [min(times)] if times else []


def _last_row(run: Run, begin: float, end: float) -> float:
    """The time of the last row of any role in [begin, end); `begin` if there is none."""
    times = [begin]
    for role in run.roles():
        with run.open_rows(role) as file:
            if file is not None:
                rows = file.newest(1) if end == inf else file.rows(file.between(end, end))
                times += [time for row in rows if (time := finite(row.get("time")) or 0.0) < end]
    return max(times)
