"""Compares the change of a value, from the beginning to the end of a run, with the noise of this change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, log, sqrt
from statistics import fmean

from asyncrl.runs.health.evidence import MOST_STEPS
from asyncrl.runs.lines import Row, finite

FEWEST_DIFFERENCES = 3
LARGEST = 1e100


@dataclass(frozen=True, slots=True)
class Trend:
    """A value at the beginning and at the end. Chance rarely explains a difference above `noise`. This is usually two
    standard errors of the difference, and infinite if the error is unknown."""

    first: float
    last: float
    noise: float

    @property
    def way(self) -> str:
        """ "up" or "down" if the difference exceeds its noise, else empty."""
        difference = self.last - self.first
        return "" if abs(difference) <= self.noise else "up" if difference > 0 else "down"

    @property
    def noise_text(self) -> str:
        """The noise for people: the number after a plus-minus sign."""
        return "unknown noise" if self.noise == inf else f"noise ±{self.noise:.2g}"


def averaged_steps(trained: int) -> int:
    """The number of steps over which the first and the last value of a run with `trained` steps are averaged."""
    return max(1, min(MOST_STEPS, trained // 4))


def of_steps(first: Sequence[Row], newest: Sequence[Row], name: str) -> Trend | None:
    """The trend of a metric of the learner; `None` if no row has it. The noise comes from the differences between
    consecutive steps, which a steady rise hardly changes."""
    begin, end = values_of(first, name), values_of(newest, name)
    if not begin or not end:
        return None
    count = averaged_steps(int(newest[-1]["step"]) - int(first[0]["step"]) + 1)
    steps = [*pairwise(begin), *pairwise(end)]
    error = inf
    if len(steps) >= FEWEST_DIFFERENCES:
        error = sqrt(fmean((after - before) ** 2 for before, after in steps) / 2)
    return Trend(fmean(begin[:count]), fmean(end[-count:]), 2 * error * sqrt(2 / count))


def of_evaluations(rows: Sequence[Row], name: str) -> Trend | None:
    """The trend of a share of held-out tasks; `None` without an evaluation. The noise is that of two independent
    samples of `eval/count` episodes."""
    known = _with(rows, name)
    return _between(known[0], known[-1], name) if known else None


def since_best(rows: Sequence[Row], name: str) -> Trend | None:
    """The trend from the best evaluation, the one with the largest share, to the last one. The best of many evaluations
    is the best partly by chance, so the noise grows with the number of evaluations."""
    known = _with(rows, name)
    if not known:
        return None
    trend = _between(max(known, key=lambda row: float(row[name])), known[-1], name)
    # The largest of n normal errors is about sqrt(2 ln n) standard errors.
    return replace(trend, noise=trend.noise * (1 + sqrt(log(len(known)) / 2)))


def _with(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if finite(row.get(name)) is not None]


def _between(first: Row, last: Row, name: str) -> Trend:
    return Trend(first[name], last[name], 2 * sqrt(_variance(first, name) + _variance(last, name)))


def _variance(row: Row, name: str) -> float:
    share = row[name]
    # A mean outside of [0, 1] is not a share, and its variance is unknown.
    return share * (1 - share) / count if 0 <= share <= 1 and (count := row.get("eval/count", 0)) > 0 else inf


def values_of(rows: Sequence[Row], name: str) -> list[float]:
    """The values of a metric, in order, without values so large that a sum or a square may overflow."""
    found = (finite(row.get(name)) for row in rows)
    return [value for value in found if value is not None and abs(value) <= LARGEST]
