"""Issues tickets (permissions to play an episode) more slowly while everything fails. Otherwise actors with a broken
tool would use up tasks at full speed.

Episodes and scorings are counted separately, since episodes may succeed while all scorings fail. After STREAK failures
of one kind in a row, tickets are issued one at a time, at intervals that double from FIRST_S to LONGEST_S. A success
sets the count of its kind to 0. The slowdown ends when both counts are below STREAK.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from asyncrl.text import kind_of, names_own_line

log = logging.getLogger(__name__)

STREAK = 32
FIRST_S = 1.0
LONGEST_S = 60.0
SHOWN_CHARACTERS = 300
MOST_KINDS = 32

EPISODES, SCORINGS = "episodes", "scorings of episodes"


class FailureBackoff:
    """Counts the failures of each kind since the last success of that kind. `newest` describes the newest failure.
    `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_a_row = {EPISODES: 0, SCORINGS: 0}
        self.newest = ""
        self._told: set[str] = set()
        self._interval_s = 0.0
        self._next = 0.0

    def succeeded(self, kind: str) -> None:
        """Note a success of `kind`."""
        self._in_a_row[kind] = 0
        if self._interval_s and max(self._in_a_row.values()) < STREAK:
            self._interval_s = 0.0
            log.info("%s succeed again: tickets are issued at full speed", kind)

    def failed(self, kind: str, name: str, reason: str) -> None:
        """Note a failure of `kind`. `name` is the ticket or trajectory."""
        self._in_a_row[kind] += 1
        self._tell(kind, name, reason)
        self.newest = f"{name}: {one_line(reason)}"
        if not self._interval_s and self._in_a_row[kind] >= STREAK:
            self._interval_s = FIRST_S
            self._next = self._clock() + FIRST_S
            log.warning("%s", self.text())

    def _tell(self, kind: str, name: str, reason: str) -> None:
        """Log the first failure of each kind of reason: as an error if the user's own code failed, else as a
        warning."""
        if len(self._told) < MOST_KINDS and (found := kind_of(reason)) not in self._told:
            self._told.add(found)
            level = logging.ERROR if names_own_line(reason) else logging.WARNING
            log.log(level, "%s fail, such as %s: %s", kind, name, one_line(reason))

    def allowed(self, want: int) -> int:
        """The number of tickets that may be issued now, at most `want`."""
        if not self._interval_s:
            return want
        return min(want, int(self._clock() >= self._next))

    def issued(self) -> None:
        """Note that an allowed ticket was issued."""
        if self._interval_s:
            self._next = self._clock() + self._interval_s
            self._interval_s = min(LONGEST_S, 2 * self._interval_s)

    def text(self) -> str:
        """A text about the failures and the newest reason. Empty while tickets are issued at full speed."""
        if not self._interval_s:
            return ""
        kind, count = max(self._in_a_row.items(), key=lambda entry: entry[1])
        return (
            f"the last {count} {kind} failed; one ticket every {self._interval_s:.0f} s; newest failure: {self.newest}"
        )


def one_line(reason: str) -> str:
    """The reason without control characters. A text of a tool or an agent may contain escape sequences of terminals."""
    return "".join(each if each.isprintable() else " " for each in reason[:SHOWN_CHARACTERS])
