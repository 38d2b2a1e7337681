"""Evaluations: sessions that are served with exactly one version, by a server that is lent to them.

It keeps that version until the last of them has ended; the others go on to newer ones with everybody else. What holds:
a server is lent only while another one is ready for training, and given back when no other one is alive; and no server
goes back to an older version. Where none is lent, or the lent one is lost, the sessions are served like all others, and
the versions of their tokens tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from asyncrl.actor.engine.fleet.member import Member, State
from asyncrl.actor.engine.fleet.update import Update

LINGER_S = 5.0
"""For so long a server stays lent without a session: the next ones of an evaluation are about to come."""


class Pins:
    """The sessions that are pinned, and the loan for one version at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: dict[str, int] = {}
        self._ended = -math.inf
        self._lent: Member | None = None
        self.update: Update | None = None

    def pin(self, session: str, version: int, newest: Update | None) -> None:
        """Serve `session` with `version` if that is still to come, is the `newest`, or has a server lent already."""
        self._sessions[session] = version
        if newest is not None:
            self.offer(newest)

    def offer(self, update: Update) -> None:
        """Lend a server for `update` if there are sessions that want it, and none that want the version of a loan."""
        wanted = self._sessions.values()
        if update.version in wanted and (self.update is None or self.update.version not in wanted):
            self.update, self._lent = update, None

    def release(self, session: str) -> None:
        if self.wants(session):
            self._ended = self._clock()
        self._sessions.pop(session, None)

    def wants(self, session: str) -> bool:
        """Whether the loan is for this session."""
        pinned = self._sessions.get(session, self._sessions.get(session.rpartition("/")[0]))
        return self.update is not None and pinned == self.update.version

    def lent(self, members: Iterable[Member]) -> Member | None:
        """The one of `members` that is lent now; it is to have `update`."""
        if self.update is None:
            return None
        alive = [member for member in members if member.state is not State.AWAY]
        over = self._lent is not None and (self._lent not in alive or len(alive) < 2)
        if over or not self._in_use(self.update.version):
            self.update = self._lent = None
        elif self._lent is None:
            self._lent = _choose([member for member in alive if member.ready], self.update.version)
        return self._lent

    def _in_use(self, version: int) -> bool:
        return version in self._sessions.values() or self._clock() < self._ended + LINGER_S


def _choose(ready: list[Member], version: int) -> Member | None:
    """The idlest that need not go back, if another one is left to training."""
    fitting = [member for member in ready if member.version <= version]
    if len(ready) < 2 or not fitting:
        return None
    return min(fitting, key=lambda member: member.under_way)
