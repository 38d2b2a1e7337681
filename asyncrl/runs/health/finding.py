"""A finding of a rule about a run, and the choice of the steps that a rule looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.runs.health.evidence import Evidence
from asyncrl.runs.lines import Row

WINDOW = 3
"""A running run gets a warning after this number of bad steps in a row."""
LONG_WINDOW, FEWEST_STEPS = 10, 5
"""The number of steps over which shares are averaged, and the smallest number that is enough to judge."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence about a run, and its kind. `is_good` is true for a remark, and false for a warning."""

    kind: str
    text: str
    is_good: bool = False


Rule = Callable[[Evidence], Finding | None]


def last_steps(seen: Evidence, count: int, fewest: int) -> list[Row]:
    """The last `count` trained steps. Empty if a running run has fewer than `fewest`."""
    rows = list(seen.newest[-count:])
    return [] if seen.is_running and len(rows) < fewest else rows


def steps_text(rows: Sequence[Row]) -> str:
    first, last = rows[0]["step"], rows[-1]["step"]
    return f"step {last}" if len(rows) == 1 else f"steps {first} to {last}"
