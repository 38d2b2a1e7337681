"""The choice of a learning rate from the runs that searched for it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.studies.figures import FAILED, Row
from benchmarks.studies.results import Results
from benchmarks.studies.study import Run


def mean_accuracy(rows: Sequence[Row]) -> float:
    """The mean over a run's evaluations, which are at equal distances; -1 for a run that failed."""
    accuracies = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    if not accuracies or rows[-1]["status"] == FAILED:
        return -1.0
    return float(sum(accuracies) / len(accuracies))


def best_rate(searches: Sequence[Run], results: Results) -> float | None:
    """The rate of the best of the runs, the lowest among equals; None while one of them has not ended."""
    found = [(results.rows(run.fingerprint), run.lr) for run in searches]
    if not all(rows for rows, _ in found):
        return None
    return max(found, key=lambda each: (mean_accuracy(each[0]), -each[1]))[1]
