"""Measures how long the learner waits for plans, by the cause of the wait."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.observe.spans import NoSpans, Spans

LEARNER_TRACK = "learner waits"
"""The track of the spans in which the learner waits for a plan. Each span has the cause of the wait as its name."""
LACKING = {"old_groups": "complete old groups"}
"""The words that the name of a span uses for a cause of a wait, if they differ from the cause."""


class LearnerWaits:
    """Measures how long the learner waits for plans, by the cause of the wait. `clock` gives monotonic seconds.

    Call `asked` at each request for a plan, and `look` regularly. The time between two looks during a wait counts for
    the cause that the first look found. `spans` get a span for each cause of a wait.
    """

    def __init__(self, clock: Callable[[], float], spans: Spans | None = None) -> None:
        self._clock = clock
        self._spans = spans or NoSpans()
        self._waits_since: float | None = None
        self._since: float | None = None
        self._cause = ""
        self._began = 0.0
        self.seconds = {"labels": 0.0, "episodes": 0.0, "store": 0.0, "old_groups": 0.0}

    def asked(self, found: bool, missing: Callable[[], str]) -> None:
        """Note a request for a plan, and whether a plan was `found`. `missing` returns the cause of a wait, and is
        called only if a wait begins."""
        if self._since is None and not found:
            self._since, self._cause = self._clock(), missing()
            self._began = self._spans.clock()
            self._waits_since = self._since
        elif found:
            self.look(lambda: "")
            self._since = self._waits_since = None

    def now_s(self) -> float | None:
        """Seconds for which the learner has been waiting. `None` if it is not waiting."""
        return None if self._waits_since is None else self._clock() - self._waits_since

    def look(self, missing: Callable[[], str]) -> None:
        """Add the time since the last look to the cause that was noted then, and note the present cause. `missing` is
        called only during a wait."""
        if self._since is not None:
            now = self._clock()
            self.seconds[self._cause] += now - self._since
            before, self._since, self._cause = self._cause, now, missing()
            if self._cause != before:
                began, self._began = self._began, self._spans.clock()
                self._spans.add(f"no {LACKING.get(before, before)}", began, self._began, LEARNER_TRACK)
