"""Units of scoring: what is leased, labelled and failed together. A unit is one trajectory, or for GROUP_KIND a whole
group, for which this holds:

- A lease has all members of a group or none, in order, and only once every one of them has all its earlier scores.
- The labels of all members are taken in one transaction or not at all.
- GROUP_KIND is the last kind, so that no member can fail after its group was scored, and scores of a group that was
  closed are never trained.
- A failure counts as an attempt of every member. After too many, every member is a dead letter and gets a new ticket,
  or the group is dropped. A member whose stored data is damaged is replaced alone, while the others wait for it.
- A complete group without scores is in the queue, or leased: a scorer that dies loses none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from asyncrl.config.schema.scoring import GROUP_KIND
from asyncrl.replay.records import GroupRecord, TrajectoryRecord, TrajectoryState
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.transaction import Transaction

Unit = list[tuple[str, TrajectoryRecord]]
"""Trajectories, by id, that are scored together; empty where there is nothing to score."""


class Units:
    """Finds units in the store, each call within the caller's transaction."""

    def __init__(self, settings: ReplaySettings) -> None:
        self._settings = settings

    def needs(self, record: TrajectoryRecord) -> tuple[str, ...]:
        """All kinds of scores that a trajectory passes through."""
        return self._settings.needs(record.data_source)

    def next_kind(self, record: TrajectoryRecord) -> str:
        """The kind of scores for which a trajectory waits, or with which a scorer's lease begins."""
        return self.needs(record)[record.scored]

    def waiting(self, tx: Transaction, kind: str, name: str) -> Unit:
        """The unit of an entry of the queue of `kind`, if it still waits."""
        if kind == GROUP_KIND:
            return self.waiting_group(tx, name)
        record = TrajectoryRecord.load(tx, name)
        return [(name, record)] if record is not None and record.state is TrajectoryState.WAITING else []

    def waiting_group(self, tx: Transaction, name: str) -> Unit:
        """The members of a group in order, if all of them wait for GROUP_KIND."""
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
        """The ids of the unit with which a leased trajectory was leased, in order."""
        group = GroupRecord.load(tx, record.group)
        if group is None or self.next_kind(record) != GROUP_KIND:
            return [name]
        return group.ids(record.group)


def attempts(unit: Unit) -> int:
    """The number of leases of a unit since its last result. A member that replaced another has fewer than the rest."""
    return max((record.attempts for _, record in unit), default=0)


def kinds_together(needed: Sequence[str], serves: Sequence[str]) -> tuple[str, ...]:
    """The kinds of one lease: those that come next and that the scorer serves. GROUP_KIND has leases of its own."""
    if needed[0] == GROUP_KIND:
        return (GROUP_KIND,)
    return tuple(takewhile(lambda kind: kind in serves and kind != GROUP_KIND, needed))
