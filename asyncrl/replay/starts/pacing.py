"""Pacing: limits how far actors run ahead of the learner, within the age bound.

Without pacing, if the learner is slower than generation, actors would start everything that the age bound admits, and
complete groups would wait until they are nearly too old. Pacing starts fewer episodes then. `ahead` limits the number
of trajectories that are admitted and not planned yet. With B trajectories per step:

- if the learner waits for a batch: `ahead` grows by B / 2 immediately, and again after every AGAIN_S seconds of the
  same wait, up to the age bound;
- if the learner did not wait, and more trajectories are complete than `spare_batches` batches have: `ahead` falls by
  this surplus / (max_lag + 1), but not below the trajectories of one version.

If the learner waits only for old groups (`batches/old_groups.py`), `ahead` stays as it is. Enough episodes are
complete, and with fewer running episodes the engines would be idle during the wait.

So `ahead` adapts to the number of episodes that keeps the learner busy, whether episodes are long or short. It rises
faster than it falls, since an idle learner costs more than data that are one version older. Pacing never changes the
age bound.
"""

from __future__ import annotations

from typing import ClassVar

from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.store.records import Record
from asyncrl.replay.store.transaction import Transaction

KEY = "pace"
RISE = 0.5
"""The number of batches by which `ahead` grows each time."""
AGAIN_S = 10.0
"""The time after which a continued wait starts more episodes, since the running ones may hang."""


class PaceRecord(Record):
    """The state of pacing.

    - `ahead`: the limit that pacing adapts
    - `most`: the age bound's limit on `ahead` when the record was saved
    - `waited`: the newest step for whose batch the learner had to wait, or -1
    - `rises`: the number of times that `ahead` grew during that wait
    """

    table: ClassVar[str] = "meta"
    ahead: float
    most: float
    waited: int = -1
    rises: int = 0


class Pace:
    """The pace of one shard. If `ReplaySettings.spare_batches` is None, only the age bound applies."""

    def __init__(self, settings: ReplaySettings) -> None:
        self._admission = settings.admission
        self._batch = settings.batch_size
        self._most = float(self._admission.capacity(0))
        self._spare = None if settings.spare_batches is None else settings.spare_batches * self._batch

    def ahead(self, tx: Transaction) -> int:
        """The largest number of trajectories that may be admitted but not planned yet. A trajectory that may be trained
        R times counts R times."""
        return int(self._most if self._spare is None else self._record(tx).ahead)

    def capacity(self, tx: Transaction) -> int:
        """The largest number of trajectories of the whole run that may be admitted by now. A trajectory that may be
        trained R times counts R times."""
        bound = self._admission.capacity(tx.counter("version"))
        if self._spare is None:
            return bound
        return min(bound, tx.count("plans") * self._batch + self.ahead(tx))

    def waits(self, tx: Transaction, step: int, seconds: float) -> None:
        """Note that the learner has been waiting for the batch of `step` for `seconds`."""
        if self._spare is None:
            return
        record = self._record(tx)
        rises = record.rises if record.waited == step else 0
        due = 1 + int(seconds / AGAIN_S)
        if due > rises:
            record.ahead += RISE * self._batch * (due - rises)
            record.waited, record.rises = step, due
            record.save(tx, KEY)

    def planned(self, tx: Transaction, step: int, left: int, waited: bool = False) -> None:
        """Note that the batch of `step` is planned, and that `left` complete trajectories remain. `waited`: the learner
        waited for old groups before this step."""
        if self._spare is None or waited:
            return
        record = self._record(tx)
        surplus = left - self._spare
        if surplus > 0 and record.waited < step:
            # A change takes effect once all earlier episodes are trained, up to max_lag + 1 steps later.
            record.ahead -= surplus / (self._admission.max_lag + 1)
            record.save(tx, KEY)

    def _record(self, tx: Transaction) -> PaceRecord:
        """The record, adjusted to the current limits: a resumed run may have a different age bound."""
        record = PaceRecord.load(tx, KEY) or PaceRecord(self._most, self._most)
        ahead = record.ahead + max(0.0, self._most - record.most)
        record.ahead = min(self._most, max(float(self._admission.per_version), ahead))
        record.most = self._most
        return record
