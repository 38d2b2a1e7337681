"""Leases of workers: a worker keeps its work as long as it sends requests at most `lease_s` seconds apart. A silent or
restarted worker loses its work.

The times are monotonic and only in memory. So neither a jump of the system clock nor a restart of the replay takes work
away: after a restart every worker has a fresh lease. A worker that sends requests but finishes nothing for
LONGEST_LEASES times `lease_s` counts as silent.

A worker that ends without being killed tells the replay, and its work goes to other workers at once. Late requests of a
killed worker cannot take work from the process that replaces it.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.errors import RefusedError
from asyncrl.replay.store.transaction import Transaction

LONGEST_LEASES = 20


class WorkerLeases:
    """The leases of all workers of one kind. `table` is "actors" or "scorers", and `clock` gives monotonic seconds."""

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
        """Renew a worker's lease. True if this is a new incarnation (process of the worker): the work of the older one
        must go to other workers.

        Raises RefusedError: a newer incarnation has already replaced this one."""
        current = tx.get(self._table, worker, str)
        if current != incarnation and self._replaced.get(worker) == incarnation:
            raise RefusedError(
                f"a newer process of the worker {worker} has replaced this one; if two processes have this name, give "
                "them different names"
            )
        self._seen[worker] = self._worked[worker] = self._clock()
        if current == incarnation:
            return False
        if current is not None:
            self._replaced[worker] = current
        tx.put(self._table, worker, incarnation)
        return True

    def holds(self, tx: Transaction, worker: str, incarnation: str) -> bool:
        """True if this incarnation of the worker has the lease."""
        return tx.get(self._table, worker, str) == incarnation

    def leave(self, tx: Transaction, worker: str, incarnation: str) -> bool:
        """End this incarnation of a worker. True if it had the lease, so that its work must go to other workers."""
        self._left[worker] = incarnation
        if not self.holds(tx, worker, incarnation):
            return False
        self._forget(tx, worker)
        return True

    def has_left(self, worker: str, incarnation: str) -> bool:
        """True if this incarnation of the worker has ended, so that its request is a late one."""
        return self._left.get(worker) == incarnation

    def touch(self, worker: str) -> None:
        """Renew a known worker's lease, unless it has finished nothing for too long."""
        now = self._clock()
        if worker in self._seen and now - self._worked[worker] < LONGEST_LEASES * self._lease_s:
            self._seen[worker] = now

    def worked(self, worker: str) -> None:
        """Note that a known worker has finished something."""
        if worker in self._seen:
            self._worked[worker] = self._clock()

    def expire(self, tx: Transaction) -> list[str]:
        """Forget the workers that were silent for too long, and return them. Their work must go to other workers."""
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
