"""What a scorer reports: counts since its start, rates, means and histograms since its last report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from asyncrl.scoring.scorer import Scored
from asyncrl.scoring.steps import Scores
from asyncrl.types import Trajectory

_EDGES = (0.0, 0.25, 0.5, 0.75)
_POSITIONS = ("first", "inner", "last")


class Tally:
    """Counts what became of the leases. Times are seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self.labelled = 0
        self._handed_on = 0
        self._failures: Counter[str] = Counter()
        self._start_window(now)

    def waited(self, seconds: float) -> None:
        """Time spent without any episode to score."""
        self._idle += seconds

    def count(self, trajectory: Trajectory, scored: Scored) -> None:
        """Labels that the replay has taken."""
        self._tokens += len(trajectory)
        if scored.final:
            self.labelled += 1
            self._window.append((trajectory, scored))
        else:
            self._handed_on += 1

    def count_failure(self, kind: Literal["failed", "refused", "waited"]) -> None:
        """An episode that was not scored, whose labels the replay refused, or whose scorer is away."""
        self._failures[kind] += 1

    def age(self, now: float) -> float:
        """Seconds since the last report."""
        return now - self._since

    def report(self, now: float) -> dict[str, float]:
        """The metrics of the time since the last report, which ends with it; docs/scoring.md says what each means."""
        seconds = max(self.age(now), 1e-9)
        values: dict[str, float] = {
            "labelled": self.labelled,
            "handed_on": self._handed_on,
            "failed": self._failures["failed"],
            "refused": self._failures["refused"],
            "waited": self._failures["waited"],
            "tokens_per_s": self._tokens / seconds,
            "idle": min(self._idle / seconds, 1.0),
        }
        if self._window:
            values |= _means(self._window)
            values |= _histograms([scored.step_scores for _, scored in self._window])
        self._start_window(now)
        return values

    def _start_window(self, now: float) -> None:
        self._since = now
        self._idle = 0.0
        self._tokens = 0
        self._window: list[tuple[Trajectory, Scored]] = []


def _means(window: Sequence[tuple[Trajectory, Scored]]) -> dict[str, float]:
    labels = [scored.labels for _, scored in window]
    values = {
        "reward_mean": _mean([each.reward for each in labels]),
        "outcome_mean": _mean([each.outcome for each in labels]),
        "steps_per_answer": _mean([len(trajectory.steps) for trajectory, _ in window]),
        "length_mean": _mean([trajectory.sampled_tokens for trajectory, _ in window]),
        "first_step_share": _mean([_first_share(trajectory) for trajectory, _ in window]),
        "repeated_steps": _mean([scored.repeated for _, scored in window]),
    }
    for name in sorted({name for each in labels for name in each.extra}):
        values[f"{name}_mean"] = _mean([each.extra[name] for each in labels if name in each.extra])
    agreed = [scored.agree for _, scored in window if scored.agree is not None]
    return values | ({"prm_agreement": _mean(agreed)} if agreed else {})


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _first_share(trajectory: Trajectory) -> float:
    """The first step's share of the policy's tokens."""
    first = trajectory.steps[0] if trajectory.steps else None
    return (first.end - first.start) / trajectory.sampled_tokens if first else 0.0


def _histograms(scores: Sequence[Scores]) -> dict[str, float]:
    """The share of scores in each bin, for first, inner and last steps. An only step is a last one."""
    places = {
        "first": [each[0] for each in scores if len(each) > 1],
        "inner": [score for each in scores for score in each[1:-1]],
        "last": [each[-1] for each in scores if len(each)],
    }
    return {name: share for place in _POSITIONS for name, share in _bins(place, places[place])}


def _bins(place: str, scores: Sequence[float]) -> Iterator[tuple[str, float]]:
    if not scores:
        return
    counts = np.bincount(np.digitize(scores, _EDGES), minlength=len(_EDGES) + 1)
    for name, count in zip(("below_0", *(f"from_{edge:g}" for edge in _EDGES)), counts, strict=True):
        yield f"step_scores/{place}/{name}", float(count / len(scores))
