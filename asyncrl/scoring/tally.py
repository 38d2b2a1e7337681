"""What a scorer reports: counts since its start, rates and means since its last report."""

from __future__ import annotations

import numpy as np

from asyncrl.types import Labels, Trajectory


class Tally:
    """Counts what became of the episodes. Times are seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self.labelled = 0
        self.failed = 0
        self._start_window(now)

    def waited(self, seconds: float) -> None:
        """Time spent without any episode to score."""
        self._idle += seconds

    def count_label(self, trajectory: Trajectory, labels: Labels) -> None:
        self.labelled += 1
        self._tokens += len(trajectory)
        self._labels.append(labels)

    def count_failure(self) -> None:
        self.failed += 1

    def age(self, now: float) -> float:
        """Seconds since the last report."""
        return now - self._since

    def report(self, now: float) -> dict[str, float]:
        """The metrics of the time since the last report, which ends with it.

        `prm_agreement` is the share of episodes on which the process model (aggregated score of at least a half) and
        the outcome (above 0) say the same; a reward that rises while it falls is being hacked.
        """
        seconds = max(self.age(now), 1e-9)
        values: dict[str, float] = {
            "labelled": self.labelled,
            "failed": self.failed,
            "tokens_per_s": self._tokens / seconds,
            "idle": min(self._idle / seconds, 1.0),
        }
        if self._labels:
            values["reward_mean"] = float(np.mean([labels.reward for labels in self._labels]))
            values["outcome_mean"] = float(np.mean([labels.outcome for labels in self._labels]))
        judged = [(labels.extra["process"], labels.outcome) for labels in self._labels if "process" in labels.extra]
        if judged:
            values["process_mean"] = float(np.mean([process for process, _ in judged]))
            values["prm_agreement"] = float(np.mean([(process >= 0.5) == (outcome > 0) for process, outcome in judged]))
        self._start_window(now)
        return values

    def _start_window(self, now: float) -> None:
        self._since = now
        self._idle = 0.0
        self._tokens = 0
        self._labels: list[Labels] = []
