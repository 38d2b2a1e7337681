"""Computes how many steps of a run are done, and how long the rest will take. All views of runs show these numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from asyncrl.runs.health.trends import values_of
from asyncrl.runs.lines import Row

PACE_STEPS = 20
"""The pace of a run is the mean time of this many of its newest steps."""


@dataclass(frozen=True, slots=True)
class StepPace:
    """The progress of a run: `done` of `planned` steps, at `step_s` seconds each. An unknown value is None."""

    done: int
    planned: int | None
    step_s: float | None

    @property
    def share(self) -> float | None:
        """The share of the steps that are done; `None` without a plan."""
        return min(1.0, self.done / self.planned) if self.planned else None

    @property
    def left_s(self) -> float | None:
        """The seconds that the remaining steps take at the pace of the newest ones; None if that is unknown."""
        if self.planned is None or self.step_s is None:
            return None
        return max(0, self.planned - self.done) * self.step_s


def pace(newest: Iterable[Row], planned: int | None) -> StepPace:
    """Compute the progress and the pace of a run. `newest` has the newest rows of the learner's metrics, in order of
    time: at least the last `PACE_STEPS` rows, or all if there are fewer."""
    rows = list(newest)[-PACE_STEPS:]
    seconds = values_of(rows, "seconds/step")
    return StepPace(rows[-1]["step"] + 1 if rows else 0, planned, fmean(seconds) if seconds else None)
