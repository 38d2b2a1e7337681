"""Reads the members of the groups that were chosen for a plan, each once, and finds the damaged ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.errors import StoreError
from asyncrl.replay.batches.old_tokens import Young, is_young, young_part
from asyncrl.replay.store.records import GroupRecord, TrajectoryRecord
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import Trajectory
from asyncrl.wire import decode, read_trajectory, split


@dataclass
class Members:
    """The facts that a plan records about its trajectories. `shared` and `young` are only valid if no trajectory is
    damaged.

    - `records`: the trajectories with their ids, in the order of the plan
    - `shared`: the length in tokens of the prefix that each trajectory shares with the trajectory before it. 0 for the
      first trajectory of a group
    - `young`: the part of each trajectory that is young enough. `None` if no token is too old
    - `damaged`: the ids of the trajectories that cannot be read, each with the reason
    """

    records: list[tuple[str, TrajectoryRecord]] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    young: list[Young] | None = None
    damaged: dict[str, str] = field(default_factory=dict)


def read_members(tx: Transaction, groups: Sequence[str], first: int) -> Members:
    """Read the members of these groups. Tokens that versions before `first` sampled are too old."""
    names = [name for group in groups for name in GroupRecord.of(tx, group).ids(group)]
    found, young = Members([(name, TrajectoryRecord.of(tx, name)) for name in names]), list[Young]()
    before: Trajectory | None = None
    for name, record in found.records:
        try:
            now = read_trajectory(decode(split(tx.present(tx.get_bytes("data", name), "data", name))))
        except StoreError as error:
            found.damaged[name] = str(error)
            continue
        found.shared.append(now.begins_as(before) if before is not None and now.group_id == before.group_id else 0)
        young.append(young_part(record, now, first))
        before = now
    if not all(is_young(record, first) for _, record in found.records):
        found.young = young
    return found
