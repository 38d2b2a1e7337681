"""Pacing: how far actors may be ahead of the learner, within the age bound.

If the learner is slower than generation, all that the age bound admits is started, and complete groups wait until they
are nearly too old. Pacing starts fewer episodes then. With B trajectories a step, `ahead` bounds the trajectories that
are admitted and in no plan yet:

- the learner waits for a batch: `ahead` grows by B / 2 at once, and again after every AGAIN_S seconds of the same wait,
  up to all that the age bound admits;
- it did not wait, and more than the spare batches are complete: `ahead` falls by the surplus trajectories, divided by
max_lag + 1, but not below one version's.

So it follows the number of episodes that keeps the learner busy, however long they take. It rises faster than it falls,
since a learner that waits costs more than data that are a version older. Pacing never changes the age bound.
"""

from __future__ import annotations

from typing import ClassVar

from asyncrl.replay.records import Record
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.transaction import Transaction

KEY = "pace"
RISE = 0.5
"""Batches by which `ahead` grows."""
AGAIN_S = 10.0
"""The time after which a wait starts more episodes, since the running ones may hang."""


class PaceRecord(Record):
    """`ahead`, and the most that the age bound allowed when that was recorded. `waited` is the newest step whose batch
    the learner had to wait for, or -1, and `rises` counts how often `ahead` grew in that wait."""

    table: ClassVar[str] = "meta"
    ahead: float
    most: float
    waited: int = -1
    rises: int = 0


class Pace:
    """The pace of one shard. Without `ReplaySettings.spare_batches` it bounds nothing."""

    def __init__(self, settings: ReplaySettings) -> None:
        self._admission = settings.admission
        self._batch = settings.batch_size
        self._most = float(self._admission.capacity(0))
        self._spare = None if settings.spare_batches is None else settings.spare_batches * self._batch

    def ahead(self, tx: Transaction) -> int:
        """The most uses of trajectories that may be promised but not planned yet."""
        return int(self._most if self._spare is None else self._record(tx).ahead)

    def capacity(self, tx: Transaction) -> int:
        """The most uses of trajectories that may be promised in total, now."""
        bound = self._admission.capacity(tx.counter("version"))
        if self._spare is None:
            return bound
        return min(bound, tx.count("plans") * self._batch + self.ahead(tx))

    def waits(self, tx: Transaction, step: int, seconds: float) -> None:
        """The learner has been waiting for the batch of `step` for so long."""
        if self._spare is None:
            return
        record = self._record(tx)
        rises = record.rises if record.waited == step else 0
        due = 1 + int(seconds / AGAIN_S)
        if due > rises:
            record.ahead += RISE * self._batch * (due - rises)
            record.waited, record.rises = step, due
            record.save(tx, KEY)

    def planned(self, tx: Transaction, step: int, left: int) -> None:
        """Note that the batch of `step` is planned, and how many complete trajectories are left."""
        if self._spare is None:
            return
        record = self._record(tx)
        surplus = left - self._spare
        if surplus > 0 and record.waited < step:
            # A change shows only once the episodes that started before it are trained, up to max_lag + 1 steps later.
            record.ahead -= surplus / (self._admission.max_lag + 1)
            record.save(tx, KEY)

    def _record(self, tx: Transaction) -> PaceRecord:
        """Within the limits as they are now: a resumed run may have another age bound."""
        record = PaceRecord.load(tx, KEY) or PaceRecord(self._most, self._most)
        ahead = record.ahead + max(0.0, self._most - record.most)
        record.ahead = min(self._most, max(float(self._admission.per_version), ahead))
        record.most = self._most
        return record
