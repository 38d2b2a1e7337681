"""The small records of the store, and the states that a trajectory passes through."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any

from asyncrl.replay.store import Transaction
from asyncrl.types import Purpose


class State(StrEnum):
    """Where a trajectory stands. The last five are ends; each has a counter of its name."""

    WAITING = "waiting"
    LEASED = "leased"
    LABELLED = "labelled"
    PLANNED = "planned"
    TRAINED = "trained"
    EVALUATED = "evaluated"
    EVICTED = "evicted"
    DROPPED = "dropped"
    DEAD = "dead"


ENDS = (State.TRAINED, State.EVALUATED, State.EVICTED, State.DROPPED, State.DEAD)


@dataclass(slots=True)
class Facts:
    """What is known of a trajectory for good. `oldest` is the oldest version that sampled a token of it."""

    group: str
    member: int
    tokens: int
    sampled: int
    oldest: int
    state: str = State.WAITING
    attempts: int = 0

    @classmethod
    def load(cls, tx: Transaction, trajectory: str) -> Facts | None:
        value = tx.get("facts", trajectory)
        return None if value is None else cls(*value)

    def save(self, tx: Transaction, trajectory: str) -> None:
        tx.put("facts", trajectory, astuple(self))


@dataclass(slots=True)
class Group:
    """Members that are baselined together. `row` is the task's row in the training or evaluation file; `version` is the
    policy version that the members need at least; `attempts` counts each member's failures; `labelled` tells which
    members are done. A member's ticket and trajectory are known by group, member and attempt."""

    row: int
    purpose: str
    version: int
    attempts: list[int]
    labelled: list[bool]

    @classmethod
    def load(cls, tx: Transaction, group: str) -> Group | None:
        value: list[Any] | None = tx.get("groups", group)
        return None if value is None else cls(*value)

    def save(self, tx: Transaction, group: str) -> None:
        tx.put("groups", group, astuple(self))

    @property
    def training(self) -> bool:
        return self.purpose == Purpose.TRAIN

    def ids(self, group: str) -> list[str]:
        """The members' ticket ids, which are their trajectories' ids too."""
        return [f"{group}.{member}.{attempt}" for member, attempt in enumerate(self.attempts)]


@dataclass(slots=True)
class Evaluation:
    """The evaluation of one policy version: how far it is, and sums over what is done."""

    total: int
    done: int
    failed: int
    outcome: float
    reward: float

    @classmethod
    def load(cls, tx: Transaction, version: int) -> Evaluation | None:
        value = tx.get("evaluations", version)
        return None if value is None else cls(*value)

    def save(self, tx: Transaction, version: int) -> None:
        tx.put("evaluations", version, astuple(self))
