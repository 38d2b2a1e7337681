"""Defines units of scoring: the trajectories that are leased, labelled and failed together. A unit is one trajectory,
or a whole group if the kind of scores is GROUP_KIND. Rules for groups:

- A lease has all members of a group in order. The group waits until all members have all earlier kinds of scores.
- The labels of all members are taken in one transaction.
- GROUP_KIND is the last kind, so that no member can fail after its group was scored. Scores that arrive for a closed
  group count as late.
- A failure counts as an attempt of every member. After too many failures, every member becomes a dead letter (a failed
  attempt), and a new ticket is issued for it or the group is dropped. If the stored data of a member is damaged, only
  this member is replaced, and the group waits for it.
- A complete group without scores is always queued or leased, so that the death of a scorer loses no group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from asyncrl.config.schema.scoring import GROUP_KIND
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.store.records import GroupRecord, TrajectoryRecord, TrajectoryState
from asyncrl.replay.store.transaction import Transaction

Unit = list[tuple[str, TrajectoryRecord]]
"""Trajectories that are scored together, with their ids. Empty if there is nothing to score."""


class Units:
    """Finds units in the store. Each call is part of the caller's transaction."""

    def __init__(self, settings: ReplaySettings) -> None:
        self._settings = settings

    def needs(self, record: TrajectoryRecord) -> tuple[str, ...]:
        """All kinds of scores that a trajectory needs, in order."""
        return self._settings.needs(record.data_source)

    def next_kind(self, record: TrajectoryRecord) -> str:
        """The next kind of scores that a trajectory needs. For a leased trajectory, the first kind of the lease."""
        return self.needs(record)[record.scored]

    def waiting(self, tx: Transaction, kind: str, name: str) -> Unit:
        """The unit of the entry `name` in the queue of `kind`. Empty if it no longer waits."""
        if kind == GROUP_KIND:
            return self.waiting_group(tx, name)
        record = TrajectoryRecord.load(tx, name)
        return [(name, record)] if record is not None and record.state is TrajectoryState.WAITING else []

    def waiting_group(self, tx: Transaction, name: str) -> Unit:
        """The members of a group in order. Empty unless all of them wait for GROUP_KIND."""
        group = GroupRecord.load(tx, name)
        if group is None:
            return []
        unit: Unit = []
        for member in group.ids(name):
            record = TrajectoryRecord.load(tx, member)
            if record is None or record.state is not TrajectoryState.WAITING:
                return []
            if self.next_kind(record) != GROUP_KIND:
                return []
            unit.append((member, record))
        return unit

    def members(self, tx: Transaction, name: str, record: TrajectoryRecord) -> list[str]:
        """The ids of a leased trajectory's unit, in order."""
        group = GroupRecord.load(tx, record.group)
        if group is None or self.next_kind(record) != GROUP_KIND:
            return [name]
        return group.ids(record.group)


def attempts(unit: Unit) -> int:
    """The number of leases of a unit since its last result. It is the largest over the members, since a replacement
    member has had fewer leases."""
    return max((record.attempts for _, record in unit), default=0)


def kinds_together(needed: Sequence[str], serves: Sequence[str]) -> tuple[str, ...]:
    """The kinds of scores of one lease: the next kinds, up to the first kind that the scorer does not serve. GROUP_KIND
    is always leased separately."""
    if needed[0] == GROUP_KIND:
        return (GROUP_KIND,)
    return tuple(takewhile(lambda kind: kind in serves and kind != GROUP_KIND, needed))
