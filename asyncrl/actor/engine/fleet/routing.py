"""Which server a session goes to: where its prefix is cached, or else to the one with the fewest sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from asyncrl.actor.engine.fleet.member import Member, State

CROWDED = 2
SLACK = 4
"""A home is crowded with more than `CROWDED` times the sessions of the emptiest server, and `SLACK` more."""


class Routes:
    """The homes of sessions. A session keeps its home until it is released, or the home is lost or crowded: the first
    server that is ready, and those that were there before another joined, are given more than their share."""

    def __init__(self) -> None:
        self._homes: dict[str, Member] = {}

    def choose(self, session: str, members: Iterable[Member], version: int) -> Member | None:
        """A member that is ready to serve `version` or newer, or None while the session had better wait.

        A home that is only being updated is waited for: its neighbours are so as well, and the first of them to be
        ready would be given everything.
        """
        home = self._homes.get(session)
        members = list(members)
        ready = [member for member in members if member.ready and member.version >= version]
        if home not in members or home.state is State.AWAY:
            self._homes.pop(session, None)
            home = None
        if not ready or (home and home not in ready):
            return None
        load = Counter(self._homes.values())
        emptiest = min(ready, key=lambda member: load[member])
        if home is None or load[home] > CROWDED * load[emptiest] + SLACK:
            self._homes[session] = emptiest
        return self._homes[session]

    def release(self, session: str) -> None:
        self._homes.pop(session, None)
