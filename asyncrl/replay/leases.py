"""Leases by worker: a worker that sends a request within `lease_s` keeps its work; a silent or restarted one loses it.

Times are of a monotonic clock and live in memory, so that neither a jumping clock nor a restart of the replay takes
work away: after a restart every worker has a fresh lease. A worker that asks but finishes nothing for LONGEST_LEASES
leases counts as silent. A worker that ends in order says so, and its work goes to others at once. One that was killed
may have requests on their way, or waiting in the replay, when its next start asks: these take nothing from that.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.errors import RefusedError
from asyncrl.replay.transaction import Transaction

LONGEST_LEASES = 20


class WorkerLeases:
    """The leases of the workers of one kind ("actors", "scorers"). `clock` gives seconds."""

    def __init__(self, table: str, lease_s: float, clock: Callable[[], float]) -> None:
        self._table = table
        self._lease_s = lease_s
        self._clock = clock
        self._seen: dict[str, float] = {}
        self._worked: dict[str, float] = {}
        self._left: dict[str, str] = {}
        self._replaced: dict[str, str] = {}

    def resume(self, tx: Transaction) -> None:
        """Give every worker in the store a fresh lease."""
        self._seen = dict.fromkeys((key.decode() for key in tx.keys(self._table)), self._clock())
        self._worked = dict(self._seen)

    def renew(self, tx: Transaction, worker: str, incarnation: str) -> bool:
        """Renew a worker's lease. True for a new incarnation, which has lost what the older one held.

        Raises RefusedError: a newer incarnation has asked since.
        """
        current = tx.get(self._table, worker, str)
        if current != incarnation and self._replaced.get(worker) == incarnation:
            raise RefusedError(
                f"a later start of the worker {worker} has taken its place; if two processes have this name, give each "
                "a name of its own"
            )
        self._seen[worker] = self._worked[worker] = self._clock()
        if current == incarnation:
            return False
        if current is not None:
            self._replaced[worker] = current
        tx.put(self._table, worker, incarnation)
        return True

    def holds(self, tx: Transaction, worker: str, incarnation: str) -> bool:
        """True if this start of the worker has the worker's lease."""
        return tx.get(self._table, worker, str) == incarnation

    def leave(self, tx: Transaction, worker: str, incarnation: str) -> bool:
        """End this start of the worker. True if it held the worker's lease: its work must go to others."""
        self._left[worker] = incarnation
        if not self.holds(tx, worker, incarnation):
            return False
        self._forget(tx, worker)
        return True

    def has_left(self, worker: str, incarnation: str) -> bool:
        """True if this start of the worker has ended: a request of it that comes now had waited somewhere."""
        return self._left.get(worker) == incarnation

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
        """Forget the workers that were silent for too long, and return them: their work must go to others."""
        horizon = self._clock() - self._lease_s
        silent = [worker for worker, when in self._seen.items() if when < horizon]
        for worker in silent:
            self._forget(tx, worker)
        return silent

    def _forget(self, tx: Transaction, worker: str) -> None:
        self._seen.pop(worker, None)
        self._worked.pop(worker, None)
        tx.delete(self._table, worker)

    def silence(self) -> dict[str, float]:
        """Seconds since each worker's last request."""
        now = self._clock()
        return {worker: now - when for worker, when in self._seen.items()}

    @property
    def count(self) -> int:
        return len(self._seen)
