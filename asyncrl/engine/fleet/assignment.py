"""Assigns sessions to endpoints (servers of the fleet). A session stays where its prefix is cached; a new session goes
to the endpoint with the fewest sessions.

Sessions of an evaluation are pinned to one version. One endpoint is leased to them: it keeps that version until the
last of these sessions has ended, while the other endpoints take newer versions.

An endpoint is leased only if another endpoint is ready for training. If no other endpoint is left, the lease ends. No
endpoint goes back to an older version. Without a lease, pinned sessions are served like all sessions; the recorded
versions of their tokens show this.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection

from asyncrl.engine.fleet.endpoint import Endpoint
from asyncrl.engine.fleet.update import Update

CROWDED = 2
SLACK = 4
"""An endpoint is crowded if it has more than `CROWDED` * (sessions of the emptiest endpoint) + `SLACK` sessions."""


class Assignment:
    """The endpoint of each session.

    A session keeps its endpoint until the session is released, or the endpoint is lost or crowded. An endpoint can get
    crowded if it was ready, or had joined, before the other endpoints.
    """

    def __init__(self) -> None:
        self._homes: dict[str, Endpoint] = {}
        self._sessions: Counter[Endpoint] = Counter()

    def assign(self, session: str, endpoints: Collection[Endpoint], version: int) -> Endpoint | None:
        """Choose one of `endpoints` that is ready to serve `version` or newer; None while the session should wait.

        A session waits while its endpoint is updated. All endpoints are updated at about the same time, so without this
        wait the first endpoint that is ready would get all sessions.
        """
        home = self._homes.get(session)
        if home is not None and (home not in endpoints or home.fails(version)):
            self.release(session)
            home = None
        ready = [endpoint for endpoint in endpoints if endpoint.ready and endpoint.version >= version]
        if not ready or (home is not None and home not in ready):
            return None
        emptiest = min(ready, key=self._sessions.__getitem__)
        if home is not None and self._sessions[home] <= CROWDED * self._sessions[emptiest] + SLACK:
            return home
        self.release(session)
        self._homes[session] = emptiest
        self._sessions[emptiest] += 1
        return emptiest

    def release(self, session: str) -> None:
        home = self._homes.pop(session, None)
        if home is not None:
            self._sessions[home] -= 1


class EvaluationLease:
    """The endpoint that is leased to the sessions pinned to the version of `update`.

    `update` is None while no session needs a lease, and `endpoint` is None while no endpoint is leased. A lease ends
    `linger_s` after its last session, since the evaluation's next sessions may be about to start.
    """

    def __init__(self, clock: Callable[[], float], linger_s: float = 5.0) -> None:
        self._clock = clock
        self._linger_s = linger_s
        self._pinned: dict[str, int] = {}
        self._ended = -math.inf
        self.endpoint: Endpoint | None = None
        self.update: Update | None = None

    def pin(self, session: str, version: int) -> None:
        """Serve `session` with `version` if an endpoint is leased for this version already, or the version is the
        newest or has not arrived yet."""
        self._pinned[session] = version

    def offer(self, update: Update) -> None:
        """Take `update` for the lease if sessions are pinned to its version, and no session is pinned to the version of
        the present lease."""
        pinned = self._pinned.values()
        if update.version in pinned and (self.update is None or self.update.version not in pinned):
            self.update, self.endpoint = update, None

    def release(self, session: str) -> None:
        if self.covers(session):
            self._ended = self._clock()
        self._pinned.pop(session, None)

    def covers(self, session: str) -> bool:
        """True if the lease is for this session, or for the episode to which the session belongs."""
        pinned = self._pinned.get(session, self._pinned.get(session.rpartition("/")[0]))
        return self.update is not None and pinned == self.update.version

    def renew(self, endpoints: Collection[Endpoint]) -> None:
        """Lease one of `endpoints`, or end the lease. Must be called after every change of an endpoint, and at
        intervals."""
        if self.update is None:
            return
        alive = [endpoint for endpoint in endpoints if not endpoint.fails(self.update.version)]
        over = self.endpoint is not None and (self.endpoint not in alive or len(alive) < 2)
        if over or not self._in_use(self.update.version):
            self.update = self.endpoint = None
        elif self.endpoint is None:
            self.endpoint = _idlest([endpoint for endpoint in alive if endpoint.ready], self.update.version)

    def _in_use(self, version: int) -> bool:
        return version in self._pinned.values() or self._clock() < self._ended + self._linger_s


def _idlest(ready: Collection[Endpoint], version: int) -> Endpoint | None:
    """The endpoint with the fewest requests among the `ready` endpoints that serve `version` or an older version. None
    if no endpoint does, or if no other endpoint would be left for training."""
    fitting = [endpoint for endpoint in ready if endpoint.version <= version]
    return min(fitting, key=lambda endpoint: endpoint.in_flight) if fitting and len(ready) > 1 else None
