"""Which server a session goes to: where its prefix is cached, or else to the one with the fewest sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from asyncrl.actor.engine.fleet.member import Member, State


class Routes:
    """The homes of sessions. A session keeps its home until it is released, or the home is lost."""

    def __init__(self) -> None:
        self._homes: dict[str, Member] = {}

    def choose(self, session: str, members: Iterable[Member], version: int) -> Member | None:
        """A member that is ready to serve `version` or newer, or None while the session had better wait.

        A home that is only being updated is waited for: its neighbours are so as well, and the first of them to be
        ready would be given everything.
        """
        home = self._homes.get(session)
        members = list(members)
        if home in members and home.state is not State.AWAY:
            return home if home.ready and home.version >= version else None
        self._homes.pop(session, None)
        ready = [member for member in members if member.ready and member.version >= version]
        if not ready:
            return None
        load = Counter(self._homes.values())
        self._homes[session] = min(ready, key=lambda member: load[member])
        return self._homes[session]

    def release(self, session: str) -> None:
        self._homes.pop(session, None)
