"""Leases by worker: who asks within `lease_s` keeps what it holds; who falls silent, or starts anew, loses it.

Times are of a monotonic clock and live in memory, so that neither a jumping clock nor a restart takes work away: after
a restart every worker has a fresh lease. Who asks but finishes nothing for LONGEST_LEASES leases is as good as silent.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.replay.store import Transaction

LONGEST_LEASES = 20


class Workers:
    """Who of one kind ("actors", "scorers") was heard of, and when. `clock` gives seconds."""

    def __init__(self, table: str, lease_s: float, clock: Callable[[], float]) -> None:
        self._table = table
        self._lease_s = lease_s
        self._clock = clock
        self._seen: dict[str, float] = {}
        self._worked: dict[str, float] = {}

    def adopt(self, tx: Transaction) -> None:
        """Give everyone whom the store knows a fresh lease."""
        now = self._clock()
        self._seen = {key.decode(): now for key, _ in tx.items(self._table)}
        self._worked = dict(self._seen)

    def seen(self, tx: Transaction, worker: str, incarnation: str) -> bool:
        """Renew a worker's lease. True where it is a new incarnation: what the older one held is lost to it."""
        self._seen[worker] = self._worked[worker] = self._clock()
        if tx.get(self._table, worker) == incarnation:
            return False
        tx.put(self._table, worker, incarnation)
        return True

    def touch(self, worker: str) -> None:
        """Renew a known worker's lease, unless it has finished nothing for too long."""
        now = self._clock()
        if worker in self._seen and now - self._worked[worker] < LONGEST_LEASES * self._lease_s:
            self._seen[worker] = now

    def worked(self, worker: str) -> None:
        """A known worker has finished something."""
        if worker in self._seen:
            self._worked[worker] = self._clock()

    def expire(self, tx: Transaction) -> list[str]:
        """Workers that were silent for too long; they are forgotten, and what they hold must go to others."""
        horizon = self._clock() - self._lease_s
        silent = [worker for worker, when in self._seen.items() if when < horizon]
        for worker in silent:
            del self._seen[worker], self._worked[worker]
            tx.delete(self._table, worker)
        return silent

    def silence(self) -> dict[str, float]:
        """For how many seconds each of them was not heard."""
        now = self._clock()
        return {worker: now - when for worker, when in self._seen.items()}

    @property
    def count(self) -> int:
        return len(self._seen)
