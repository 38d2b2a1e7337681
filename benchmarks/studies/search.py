"""The choice of a learning rate from the runs that searched for it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.studies.figures import Row, mean_accuracy
from benchmarks.studies.results import Results
from benchmarks.studies.study import Run


def best_rate(searches: Sequence[Run], results: Results) -> float | None:
    """The rate of the best of the runs, the lowest among equals; None while one of them has not ended."""
    found = [(results.rows(run.fingerprint), run.lr) for run in searches]
    if not all(rows for rows, _ in found):
        return None
    return max(found, key=lambda each: (_value(each[0]), -each[1]))[1]


def _value(rows: Sequence[Row]) -> float:
    """A failed run is worse than all others."""
    accuracy = mean_accuracy(rows)
    return -1.0 if accuracy is None else accuracy
