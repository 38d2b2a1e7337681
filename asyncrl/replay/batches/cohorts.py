"""Counts what becomes of each cohort: the groups that were begun at one policy version.

The counts are a part of the store, and change in the transaction that opens or closes a group. A cohort takes a few
hundred bytes until it is counted. To count it means to add it to the `Selection` of the run, and to delete it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

from asyncrl.ids import ticket_id
from asyncrl.replay.batches.selection import QUANTITIES, Contrast, Selection, Sums
from asyncrl.replay.store.records import GroupRecord, TrajectoryRecord, TrajectoryState
from asyncrl.replay.store.transaction import Transaction

SELECTION = "selection"
"""The key in the table `meta` under which the `Selection` of all counted cohorts is stored."""
OLDEST = "oldest_cohort"
"""The name of the counter that has the version of the oldest cohort that is not counted yet."""
TRAINED, MASKED = TrajectoryState.TRAINED.value, "masked"


class Moments(Struct, array_like=True):
    """Sums of a quantity over groups. `of_trained` is its sum over the trained groups, and `total` its sum over the
    trained and evicted groups. `squares` is the sum of its squares over the trained and evicted groups."""

    of_trained: float = 0.0
    total: float = 0.0
    squares: float = 0.0


class Cohort(Struct, array_like=True):
    """The groups begun at one version. `undecided` is the number of open groups; `trained` and `evicted` are numbers of
    closed groups."""

    undecided: int = 0
    trained: int = 0
    evicted: int = 0
    moments: dict[str, Moments] = {}
    sums: dict[str, Sums] = {}

    def add_group(self, values: dict[str, float], is_trained: bool) -> None:
        """Add a trained or evicted group with the value of each quantity."""
        self.trained += is_trained
        self.evicted += not is_trained
        for name, value in values.items():
            moments = self.moments.setdefault(name, Moments())
            moments.of_trained += value * is_trained
            moments.total += value
            moments.squares += value * value

    @property
    def selection(self) -> Selection:
        """The counts of this cohort alone."""
        contrasts = {
            name: Contrast.of_sums(self.trained, self.evicted, each.of_trained, each.total, each.squares)
            for name, each in self.moments.items()
        }
        return Selection(self.sums, contrasts)


def selection(tx: Transaction) -> Selection:
    """The counted episodes of this shard."""
    return tx.get("meta", SELECTION, Selection) or Selection()


def begin(tx: Transaction, version: int) -> None:
    """Note that a training group is begun at `version`."""
    cohort = _cohort(tx, version) or Cohort()
    cohort.undecided += 1
    tx.put("meta", _key(version), cohort)


def decide(tx: Transaction, name: str, group: GroupRecord, end: TrajectoryState) -> None:
    """Count a training group that is about to be closed with the state `end`, and its episodes. Then count the oldest
    cohorts, up to the first one with an open group. Raises StoreError if the group's cohort is missing."""
    cohort = tx.present(_cohort(tx, group.begun), "meta", _key(group.begun))
    cohort.undecided -= 1
    episodes = []
    for record in _played(tx, name, group):
        fate = _fate(record, end)
        is_final = fate not in (TrajectoryState.DEAD, TrajectoryState.DROPPED)
        reward = record.reward if is_final else None
        cohort.sums.setdefault(fate, Sums()).add(record.sampled, record.turns, reward)
        if fate in (TRAINED, MASKED, TrajectoryState.EVICTED):
            episodes.append(record)
    if episodes:
        cohort.add_group(_values(episodes), any(record.plans for record in episodes))
    tx.put("meta", _key(group.begun), cohort)
    _count_decided(tx)


def _fate(record: TrajectoryRecord, end: TrajectoryState) -> str:
    """The end of an episode, one of `selection.ENDS`, if its group is closed with the state `end`."""
    if record.state is TrajectoryState.DEAD or not record.plans:
        return (record.state if record.state is TrajectoryState.DEAD else end).value
    return TRAINED if record.trained_tokens else MASKED


def _played(tx: Transaction, name: str, group: GroupRecord) -> Iterator[TrajectoryRecord]:
    """The stored episodes that the policy played for a group, including episodes whose scoring failed."""
    for member, attempts in enumerate(group.attempts):
        if group.is_demonstration(member):
            continue
        for attempt in range(attempts + 1):
            record = TrajectoryRecord.load(tx, ticket_id(name, member, attempt))
            if record is not None:
                yield record


def _values(episodes: list[TrajectoryRecord]) -> dict[str, float]:
    """The quantities of a group. Lengths and turns have long tails, so trained and evicted groups are compared by their
    logarithms."""
    count = len(episodes)
    length, turns = sum(each.sampled for each in episodes), sum(each.turns for each in episodes)
    values = (math.log1p(length / count), math.log1p(turns / count), sum(each.reward for each in episodes) / count)
    return dict(zip(QUANTITIES, values, strict=True))


def _count_decided(tx: Transaction) -> None:
    """Count cohorts in order, up to the first one with an open group. The cohort of the newest version is not counted,
    since more groups may begin at this version."""
    oldest = tx.counter(OLDEST)
    while oldest < tx.counter("version"):
        cohort = _cohort(tx, oldest)
        if cohort is not None:
            if cohort.undecided:
                break
            tx.put("meta", SELECTION, selection(tx) + cohort.selection)
            tx.delete("meta", _key(oldest))
        oldest += 1
    if oldest != tx.counter(OLDEST):
        tx.set(OLDEST, oldest)


def _cohort(tx: Transaction, version: int) -> Cohort | None:
    return tx.get("meta", _key(version), Cohort)


def _key(version: int) -> str:
    return f"cohort/{version}"
