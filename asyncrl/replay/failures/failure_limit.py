"""Ends a run in which too many episodes or scorings fail, for example because of a broken tool, agent or rule.

Episodes and scorings have separate limits. A run ends in two cases:

* At the start: at least FEWEST failed, none succeeded, and START_S have passed since the first failure. If all failures
  are of one group, its task may be bad, so SINGLE_GROUP_S must pass instead of START_S. The run does not end while an
  episode or scoring has been running longer than any failed one, since this longer one may still succeed. After the
  first success, even in an earlier process of the replay, this case cannot occur. So a later outage does not end a run.
* By the share of failures: during the last WINDOW_S, the failed share of the newest WINDOW episodes (or scorings) was
  never below `max_share`. Without `max_share` the limit is HOPELESS_SHARE, of at least FEWEST_HOPELESS episodes. This
  limit applies only until the run has been healthy once, which means that less than HEALTHY_SHARE failed. So a broken
  tool ends a run in which a few episodes succeed because they never call this tool, but a later outage does not end a
  run. For HOPELESS_SHARE, an episode or scoring that has been running longer than any failed one counts as a success,
  since the successes may be the slow ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from asyncrl.errors import TooManyFailuresError
from asyncrl.replay.failures.backoff import one_line

FEWEST = 8
START_S = 20.0
SINGLE_GROUP_S = 60.0
WINDOW = 200
FEWEST_IN_WINDOW = 20
WINDOW_S = 60.0
HOPELESS_SHARE, FEWEST_HOPELESS = 0.9, 100
HEALTHY_SHARE = 0.5


class FailureLimit:
    """Counts the failures of either episodes or scorings. `kind` is what messages call them. An episode is named by its
    ticket (the permission to play it), and a scoring by its trajectory. `clock` gives monotonic seconds."""

    def __init__(self, kind: str, clock: Callable[[], float], max_share: float | None = None) -> None:
        self._kind = kind
        self._clock = clock
        self._max_share = max_share
        self._was_healthy = False
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
        """Note how many episodes (or scorings) succeeded before this process of the replay."""
        self._one_ended_well |= ended_well > 0
        self._was_healthy |= ended_well >= WINDOW

    def began(self, name: str) -> None:
        """Note that an actor or scorer got the ticket or trajectory `name`."""
        self._running[name] = self._clock()

    def left(self, name: str) -> None:
        """Note that the ticket or trajectory `name` was taken back, or ended without a result."""
        self._running.pop(name, None)

    def succeeded(self, name: str) -> None:
        """Note that the ticket or trajectory `name` succeeded."""
        self.left(name)
        self._one_ended_well = True
        self._judge(failed=False)

    def failed(self, name: str, group: str, reason: str) -> None:
        """Note that the ticket or trajectory `name`, a member of `group`, failed."""
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
        share = sum(self._window) / len(self._window)
        self._was_healthy |= len(self._window) >= FEWEST_IN_WINDOW and share < HEALTHY_SHARE
        if not self._is_over(share):
            self._over_since = None
        elif self._over_since is None:
            self._over_since = self._clock()

    def _is_over(self, share: float) -> bool:
        """True if this failed share of the window reaches the limit."""
        if self._max_share is not None:
            return len(self._window) >= FEWEST_IN_WINDOW and share >= self._max_share
        return len(self._window) >= FEWEST_HOPELESS and share >= HOPELESS_SHARE and not self._was_healthy

    def _may_recover(self) -> bool:
        """True if the limit is HOPELESS_SHARE, and the failed share is below it when each ticket or trajectory that
        `_long` counts is taken as a success."""
        return self._max_share is None and sum(self._window) < HOPELESS_SHARE * (len(self._window) + self._long())

    def _long(self) -> int:
        """The number of tickets or trajectories that have been running longer than any failed one."""
        now = self._clock()
        return sum(now - began > self._longest_failed_s for began in self._running.values())

    def verdict(self) -> str:
        """The reason why the run must end, as text. Empty while the run may continue."""
        if self._none_ends_well():
            return f"none of the first {self._failures} {self._kind} ended well; the newest failure is {self._newest}"
        is_over = self._over_since is not None and self._clock() - self._over_since >= WINDOW_S
        if is_over and not self._may_recover():
            reached = (
                f"the share has never been below {HEALTHY_SHARE:.0%}"
                if self._max_share is None
                else f"actor.max_failure_share={self._max_share:g} was reached for {WINDOW_S:.0f} s"
            )
            share = sum(self._window) / len(self._window)
            return (
                f"{share:.0%} of the last {len(self._window)} {self._kind} failed, and {reached}; the newest failure "
                f"is {self._newest}"
            )
        return ""

    def _none_ends_well(self) -> bool:
        if self._one_ended_well or self._failures < FEWEST:
            return False
        if self._clock() - self._first_failure < (START_S if self._several_groups else SINGLE_GROUP_S):
            return False
        return not self._long()


def check_all(limits: Mapping[str, FailureLimit], run: str) -> None:
    """Raises TooManyFailuresError: according to one of the limits, the run must end. `run` is the folder of the run."""
    for limit in limits.values():
        if verdict := limit.verdict():
            raise TooManyFailuresError(
                f"{verdict}\n`asyncrl inspect dead-letters {run}` groups the failures by their reasons, and the logs "
                "of actors and scorers have the tracebacks; mend the cause, then run the same command again"
            )
