"""Chooses a learning rate from the runs of a search."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.studies.figures import mean_accuracy
from benchmarks.studies.results import Results
from benchmarks.studies.study import Run


def best_rate(searches: Sequence[Run], results: Results) -> float | None:
    """The learning rate of the best run, the lowest if several are equal. None while a run has not ended, or if all
    failed."""
    found = [(results.rows(run.fingerprint), run.lr) for run in searches]
    if not all(rows for rows, _ in found):
        return None
    known = [(accuracy, -rate) for rows, rate in found if (accuracy := mean_accuracy(rows)) is not None]
    return -max(known)[1] if known else None


def all_failed(searches: Sequence[Run], results: Results) -> bool:
    """True if all runs have ended and failed."""
    found = [results.rows(run.fingerprint) for run in searches]
    return all(rows and mean_accuracy(rows) is None for rows in found)
