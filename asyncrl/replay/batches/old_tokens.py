"""Masks the tokens that are too old, so that the rest of their group can be trained.

A group with tokens older than max_lag is either thrown away, or trained with these tokens as context without loss. All
its members count in its baseline. The plan records the oldest version that it trains. So the same tokens are masked if
the step is repeated, also after a change of max_lag, and if the store is trained again.

A group is thrown away if all its tokens are too old.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.store.records import ReadyGroup, TrajectoryRecord
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import Trajectory

MASKED = "tokens_masked"
"""The counter of masked tokens. Masked tokens also count as thrown away."""


class Young(NamedTuple):
    """The part of a trajectory that is young enough: its number of tokens, and the oldest version that sampled one of
    them (-1 without tokens)."""

    tokens: int
    oldest: int


def deciding_version(settings: ReplaySettings, group: ReadyGroup) -> int:
    """The version whose age decides if a complete group is thrown away: the version of the group's oldest token. If old
    tokens are masked, it is the newest version that is known to have sampled one of the group's tokens."""
    return max(group.oldest, group.newest) if settings.masks_old else group.oldest


def is_young(record: TrajectoryRecord, first: int) -> bool:
    """True if no version before `first` sampled a token of the trajectory."""
    return record.is_demonstration or record.oldest >= first


def young_part(record: TrajectoryRecord, trajectory: Trajectory, first: int) -> Young:
    """The part of a trajectory that versions from `first` on sampled."""
    if is_young(record, first):
        return Young(record.sampled, record.oldest)
    starts, versions = trajectory.version_runs.T.tolist()
    runs = zip(pairwise([*starts, len(trajectory)]), versions, strict=True)
    young = [(end - start, version) for (start, end), version in runs if version >= first]
    return Young(sum(tokens for tokens, _ in young), min((version for _, version in young), default=-1))


def mask(tx: Transaction, record: TrajectoryRecord, young: Young, version: int) -> None:
    """Note that a plan at `version` trains only the `young` part of a trajectory."""
    if young.tokens < record.sampled:
        record.masked = record.sampled - young.tokens
        record.lag = version - young.oldest if young.tokens else -1
        _count(tx, record.masked)


def unmask(tx: Transaction, record: TrajectoryRecord) -> None:
    """Undo `mask` for a trajectory that is taken out of its plan."""
    _count(tx, -record.masked)
    record.masked = 0


def _count(tx: Transaction, tokens: int) -> None:
    tx.add(MASKED, tokens)
    tx.add("tokens_thrown_away", tokens)
