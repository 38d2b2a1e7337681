"""The metrics of a scorer, and the alarm on reward hacking. Times are seconds of one monotonic clock."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

import numpy as np

from asyncrl.config.schema import GuardConfig
from asyncrl.scoring.labels import ScoredEpisode
from asyncrl.scoring.shaping import Scores
from asyncrl.types import Trajectory

_EDGES = (0.0, 0.25, 0.5, 0.75)
_LEAST_POINTS = 6

logger = logging.getLogger(__name__)


class HackAlarm:
    """Watches trends over a sliding window of time. The alarm rings while three things are true: the mean reward rises,
    the outcomes do not, and the process model agrees with the rules less and less.

    Falling agreement alone raises no alarm: while a policy learns, its steps become right before its answers do."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._points: deque[tuple[float, float, float, float]] = deque()
        self.ringing = False
        self.count = 0

    def add(self, now: float, reward: float, outcome: float, agreement: float) -> bool:
        """Add the means of one report. Return true if this report starts the alarm. Return false if the alarm rang
        already, or does not ring."""
        self._points.append((now, reward, outcome, agreement))
        while now - self._points[0][0] > self._config.window_s:
            self._points.popleft()
        reward, outcome, agreement = self._changes()
        rise, fall = self._config.reward_rise, self._config.agreement_fall
        before = self.ringing
        self.ringing = reward >= rise > outcome and agreement <= -fall
        self.count += self.ringing and not before
        return self.ringing and not before

    def values(self) -> dict[str, float]:
        """The metrics of the alarm. Empty until it has a report. Without a process model or without rules, there is no
        agreement and so no report. Then metrics of a silent alarm would look like a sign of health, although the alarm
        cannot ring."""
        return {"hack_alarm": float(self.ringing), "hack_alarms": float(self.count)} if self._points else {}

    def _changes(self) -> tuple[float, float, float]:
        """The changes of reward, outcome and agreement over the window, by linear fits. They are 0 as long as the
        reports are too few, or cover less than half of the window."""
        times, *trends = np.array(self._points).T
        span = times[-1] - times[0]
        if len(times) < _LEAST_POINTS or span < self._config.window_s / 2:
            return 0.0, 0.0, 0.0
        reward, outcome, agreement = np.polyfit(times - times[0], np.stack(trends, axis=1), 1)[0] * span
        return float(reward), float(outcome), float(agreement)


class ScoringStats:
    """The metrics of a scorer: counts since the process started, and rates, means and histograms since the last
    report."""

    def __init__(self, now: float, guards: GuardConfig) -> None:
        self._counts = Counter(labelled=0, handed_on=0, failed=0, refused=0, waited=0)
        self._alarm = HackAlarm(guards)
        self._start_window(now)

    def waited(self, seconds: float) -> None:
        """Add time spent without any episode to score."""
        self._idle += seconds

    def count(self, trajectory: Trajectory, scored: ScoredEpisode) -> None:
        """Add labels that the replay has accepted."""
        self._tokens += len(trajectory)
        self._counts["labelled" if scored.final else "handed_on"] += 1
        if scored.final and not trajectory.is_demonstration:
            self._window.append((trajectory, scored))

    def count_failure(self, kind: Literal["failed", "refused", "waited"], episodes: int = 1) -> None:
        """Add episodes that failed, whose labels the replay refused, or that wait for an unavailable service."""
        self._counts[kind] += episodes

    def age(self, now: float) -> float:
        """Seconds since the last report."""
        return now - self._since

    def report(self, now: float) -> dict[str, float]:
        """The metrics since the last report, listed in docs/metrics.md. Starts a new window."""
        seconds = max(self.age(now), 1e-9)
        values: dict[str, float] = {
            **self._counts,
            "tokens_per_s": self._tokens / seconds,
            "idle": min(self._idle / seconds, 1.0),
        }
        if self._window:
            values |= _means(self._window)
            values |= _histograms([scored.step_scores for _, scored in self._window])
        self._start_window(now)
        if "prm_agreement" in values:
            reward, outcome, agreement = (values[name] for name in ("reward_mean", "outcome_mean", "prm_agreement"))
            if self._alarm.add(now, reward, outcome, agreement):
                logger.warning(
                    "the reward rises (now %.3g) and the outcomes do not (now %.3g), while process model and rules "
                    "agree less and less (now %.3g): the policy may be exploiting the process model; see "
                    "docs/scoring.md, Guards",
                    reward,
                    outcome,
                    agreement,
                )
        return values | self._alarm.values()

    def _start_window(self, now: float) -> None:
        self._since = now
        self._idle = 0.0
        self._tokens = 0
        self._window: list[tuple[Trajectory, ScoredEpisode]] = []


def _means(window: Sequence[tuple[Trajectory, ScoredEpisode]]) -> dict[str, float]:
    labels = [scored.labels for _, scored in window]
    values = {
        "reward_mean": fmean([each.reward for each in labels]),
        "outcome_mean": fmean([each.outcome for each in labels]),
        "steps_per_answer": fmean([len(trajectory.steps) for trajectory, _ in window]),
        "length_mean": fmean([trajectory.sampled_tokens for trajectory, _ in window]),
        # The first step's share of the policy's tokens in the episode.
        "first_step_share": fmean(
            [sum(step.end - step.start for step in each.steps[:1]) / each.sampled_tokens for each, _ in window]
        ),
        "repeated_steps": fmean([scored.repeated for _, scored in window]),
    }
    for name in sorted({name for each in labels for name in each.extra}):
        values[f"{name}_mean"] = fmean([each.extra[name] for each in labels if name in each.extra])
    agreed = [scored.agree for _, scored in window if scored.agree is not None]
    return values | ({"prm_agreement": fmean(agreed)} if agreed else {})


def _histograms(scores: Sequence[Scores]) -> dict[str, float]:
    """The share of scores in each bin, for first, inner and last steps. The only step of an episode is a
    last step."""
    positions = {
        "first": [each[0] for each in scores if len(each) > 1],
        "inner": [score for each in scores for score in each[1:-1]],
        "last": [each[-1] for each in scores if len(each)],
    }
    values = {}
    for position, at in positions.items():
        counts = np.bincount(np.digitize(at, _EDGES), minlength=len(_EDGES) + 1) if at else ()
        for name, count in zip(("below_0", *(f"from_{edge:g}" for edge in _EDGES)), counts, strict=False):
            values[f"step_scores/{position}/{name}"] = float(count / len(at))
    return values
