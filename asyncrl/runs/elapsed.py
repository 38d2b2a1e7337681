"""Computes for how long a run has run: all of its starts together, without the pauses between them.

`environment.json` has the time of each start. The time after an earlier start counts until the last row that
any role wrote before the next start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from math import inf
from pathlib import Path

from asyncrl.config.locations import SUMMARY_FILE
from asyncrl.runs.environment import read_environments
from asyncrl.runs.lines import finite
from asyncrl.runs.run import Run


def elapsed_s(run: Run, clock: Callable[[], float] = time.time) -> float:
    """The seconds for which a run has run; 0 if nothing shows that it ever started. Once the run has ended, its summary
    has the number, which is returned from then on. `clock` gives seconds since 1970."""
    begins = _starts(run) or _first_rows(run)
    if not begins:
        return 0.0
    if run.is_running():
        return _of_ended(run, begins) + max(0.0, clock() - begins[-1])
    written = finite(run.summary().get("elapsed_s"))
    if written is not None and _is_after(run.folder / SUMMARY_FILE, begins[-1]):
        return written
    return _of_ended(run, begins) + _last_row(run, begins[-1], inf) - begins[-1]


def earlier_s(run: Run) -> float:
    """The seconds for which a run ran before its newest start."""
    return _of_ended(run, _starts(run))


def newest_start(run: Run) -> float:
    """The time of the newest start of a run, in seconds since 1970; 0 if it is unknown."""
    return max(_starts(run), default=0.0)


def _is_after(file: Path, begin: float) -> bool:
    """True if the file was written after `begin`, the time of the newest start. Then the file covers all starts."""
    return file.stat().st_mtime >= begin


def _starts(run: Run) -> list[float]:
    return [each.time for each in read_environments(run.folder)]


def _of_ended(run: Run, begins: Sequence[float]) -> float:
    return sum(_last_row(run, begin, end) - begin for begin, end in pairwise(begins))


def _first_rows(run: Run) -> list[float]:
    """The time of the earliest row of any role, for a run that did not record its starts. Empty without rows."""
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
