"""Decides when so much fails that the run must end: a run whose tool, agent or rule is broken may run unwatched.

Episodes and scorings are judged apart, with a limit each. A run ends in two cases:

* None of its first FEWEST or more ended well, START_S have passed since the first failure, and several groups had
  failures. A single group may be a bad task, so it has SINGLE_GROUP_S. Nothing is decided while one runs for longer
  than any that failed: it may yet end well. After one that ended well, in this process or an earlier one of the run,
  this case is over: a later outage does not end a run.
* `max_share`, where set: at least this share of the last WINDOW failed, at every moment of the last WINDOW_S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from asyncrl.errors import TooManyFailuresError
from asyncrl.replay.backoff import one_line

FEWEST = 8
START_S = 20.0
SINGLE_GROUP_S = 60.0
WINDOW = 200
FEWEST_IN_WINDOW = 20
WINDOW_S = 60.0
ADVICE = (
    "`asyncrl inspect dead-letters` lists the failures, and the logs of actors and scorers have their tracebacks; mend "
    "the cause, then run the same command again"
)


class FailureLimit:
    """Counts the failures of one `kind`, which is a word for people. `clock` gives monotonic seconds."""

    def __init__(self, kind: str, clock: Callable[[], float], max_share: float | None = None) -> None:
        self._kind = kind
        self._clock = clock
        self._max_share = max_share
        self._running: dict[str, float] = {}
        self._window: deque[bool] = deque(maxlen=WINDOW)
        self._over_since: float | None = None
        self._one_ended_well = False
        self._failures = 0
        self._first_failure = self._longest_failed_s = 0.0
        self._first_group = ""
        self._several_groups = False
        self._newest = ""

    def resume(self, ended_well: int) -> None:
        """Start from the number that ended well in earlier processes of the run."""
        self._one_ended_well |= ended_well > 0

    def began(self, name: str) -> None:
        """The ticket or trajectory `name` was given to an actor or scorer."""
        self._running[name] = self._clock()

    def left(self, name: str) -> None:
        """The ticket or trajectory `name` was taken back, or ended without a result."""
        self._running.pop(name, None)

    def succeeded(self, name: str) -> None:
        """The ticket or trajectory `name` ended well."""
        self.left(name)
        self._one_ended_well = True
        self._judge(failed=False)

    def failed(self, name: str, group: str, reason: str) -> None:
        """The ticket or trajectory `name`, a member of `group`, failed."""
        now = self._clock()
        self._longest_failed_s = max(self._longest_failed_s, now - self._running.pop(name, now))
        if not self._failures:
            self._first_failure, self._first_group = now, group
        self._failures += 1
        self._several_groups |= group != self._first_group
        self._newest = f"{name}: {one_line(reason)}"
        self._judge(failed=True)

    def _judge(self, failed: bool) -> None:
        self._window.append(failed)
        if self._max_share is None or self._share() < self._max_share:
            self._over_since = None
        elif self._over_since is None:
            self._over_since = self._clock()

    def _share(self) -> float:
        """The share of the window that failed; 0 while it has too few."""
        return sum(self._window) / len(self._window) if len(self._window) >= FEWEST_IN_WINDOW else 0.0

    def verdict(self) -> str:
        """The reason why the run must end, for people; empty while it may continue."""
        if self._none_ends_well():
            return f"none of the first {self._failures} {self._kind} ended well; the newest failure is {self._newest}"
        if self._over_since is not None and self._clock() - self._over_since >= WINDOW_S:
            return (
                f"{self._share():.0%} of the last {len(self._window)} {self._kind} failed, and "
                f"actor.max_failure_share={self._max_share:g} was reached for {WINDOW_S:.0f} s; the newest failure is "
                f"{self._newest}"
            )
        return ""

    def _none_ends_well(self) -> bool:
        if self._one_ended_well or self._failures < FEWEST:
            return False
        now = self._clock()
        if now - self._first_failure < (START_S if self._several_groups else SINGLE_GROUP_S):
            return False
        return all(now - began <= self._longest_failed_s for began in self._running.values())


def check_all(limits: Mapping[str, FailureLimit]) -> None:
    """Raises TooManyFailuresError: one of the limits says that the run must end."""
    for limit in limits.values():
        if verdict := limit.verdict():
            raise TooManyFailuresError(f"{verdict}\n{ADVICE}")
