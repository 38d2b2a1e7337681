"""Keeps track of the tickets that a worker holds. A ticket permits one episode."""

from __future__ import annotations


class HeldTickets:
    """Keeps each ticket from its arrival until the replay has acknowledged its outcome.

    The replay renews the leases of all held tickets. A ticket whose episode runs for too long counts as failed there,
    but the time in which its episode does not run is not counted.
    """

    def __init__(self) -> None:
        self._arrivals: dict[str, float] = {}
        self._running: set[str] = set()
        self._undelivered: set[str] = set()

    def __contains__(self, ticket_id: str) -> bool:
        return ticket_id in self._arrivals

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of all held tickets."""
        return tuple(self._arrivals)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The ids of the held tickets whose episode is not running."""
        return tuple(self._arrivals.keys() - self._running)

    @property
    def undelivered(self) -> int:
        """The number of episodes that have begun and were not delivered yet."""
        return len(self._undelivered)

    def arrived(self, ticket_id: str, now: float) -> None:
        """Hold a ticket that arrived at the time `now`."""
        self._arrivals[ticket_id] = now

    def arrival(self, ticket_id: str) -> float:
        """The time at which a held ticket arrived."""
        return self._arrivals[ticket_id]

    def begun(self, ticket_id: str) -> None:
        """Note that the episode of a ticket runs."""
        self._running.add(ticket_id)
        self._undelivered.add(ticket_id)

    def ended(self, ticket_id: str) -> None:
        """Note that the episode of a ticket has stopped, with or without an outcome."""
        self._running.discard(ticket_id)

    def acknowledged(self, ticket_id: str) -> None:
        """Release a ticket whose outcome the replay has acknowledged."""
        del self._arrivals[ticket_id]
        self._undelivered.discard(ticket_id)
