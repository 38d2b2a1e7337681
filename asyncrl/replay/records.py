"""The small records of the store, and the states that a trajectory passes through."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from asyncrl.replay.store import Transaction
from asyncrl.types import Purpose


class State(StrEnum):
    """Where a trajectory stands. The last six are ends; each has a counter of its name."""

    WAITING = "waiting"
    LEASED = "leased"
    LABELLED = "labelled"
    PLANNED = "planned"
    TRAINED = "trained"
    EVALUATED = "evaluated"
    EVICTED = "evicted"
    FILTERED = "filtered"
    DROPPED = "dropped"
    DEAD = "dead"


LIVE = (State.WAITING, State.LEASED, State.LABELLED, State.PLANNED)
ENDS = tuple(state for state in State if state not in LIVE)
THROWN_AWAY = (State.EVICTED, State.FILTERED, State.DROPPED)


@dataclass(slots=True)
class Facts:
    """What is known of a trajectory for good.

    `oldest` is the oldest version that sampled a token of it. `scored` kinds of scores are done, `leased` more are
    with a scorer, after `attempts`. `plans` counts the plans that name it, `last_plan` is the newest of them, and
    `trained` counts those that a checkpoint covers.
    """

    group: str
    member: int
    tokens: int
    sampled: int
    oldest: int
    state: str = State.WAITING
    attempts: int = 0
    scored: int = 0
    leased: int = 0
    reward: float = 0.0
    outcome: float = 0.0
    plans: int = 0
    last_plan: int = -1
    trained: int = 0

    @classmethod
    def load(cls, tx: Transaction, trajectory: str) -> Facts | None:
        value = tx.get("facts", trajectory)
        return None if value is None else cls(*value)

    @classmethod
    def of(cls, tx: Transaction, trajectory: str) -> Facts:
        """The facts of a trajectory that is known. Raises StoreError: they are gone."""
        return tx.present(cls.load(tx, trajectory), "facts", trajectory)

    def save(self, tx: Transaction, trajectory: str) -> None:
        tx.put("facts", trajectory, _values(self))


@dataclass(slots=True)
class Group:
    """Members that are baselined together. `row` is the task's row in the training or evaluation file; `version` is the
    policy version that the members need at least; `attempts` counts each member's failures; `labelled` tells which
    members are done; `sampled` counts the plans that it went into. A member's ticket and trajectory are known by group,
    member and attempt."""

    row: int
    purpose: str
    version: int
    attempts: list[int]
    labelled: list[bool]
    sampled: int = 0

    @classmethod
    def load(cls, tx: Transaction, group: str) -> Group | None:
        value: list[Any] | None = tx.get("groups", group)
        return None if value is None else cls(*value)

    @classmethod
    def of(cls, tx: Transaction, group: str) -> Group:
        """A group that is open. Raises StoreError: it is gone."""
        return tx.present(cls.load(tx, group), "groups", group)

    def save(self, tx: Transaction, group: str) -> None:
        tx.put("groups", group, _values(self))

    @property
    def training(self) -> bool:
        return self.purpose == Purpose.TRAIN

    def ids(self, group: str) -> list[str]:
        """The members' ticket ids, which are their trajectories' ids too."""
        return [f"{group}.{member}.{attempt}" for member, attempt in enumerate(self.attempts)]


@dataclass(slots=True)
class Evaluation:
    """The evaluation of one policy version: how far it is, and sums over what is done; the tokens that were sampled for
    it, how many of these by newer versions, and the newest of all."""

    total: int
    done: int
    failed: int
    outcome: float
    reward: float
    tokens: int = 0
    newer_tokens: int = 0
    newest: int = -1

    @classmethod
    def load(cls, tx: Transaction, version: int) -> Evaluation | None:
        value = tx.get("evaluations", version)
        return None if value is None else cls(*value)

    def save(self, tx: Transaction, version: int) -> None:
        tx.put("evaluations", version, _values(self))


@dataclass(slots=True)
class Letter:
    """Why an attempt was given up. `row` is its task's row of the training file; -1 for held-out tasks. `scoring` tells
    that the episode is there, but could not be scored. `order` is its place in `burials`, and `size` what it takes of
    the store with its episode, in bytes."""

    reason: str
    group: str
    member: int
    attempt: int
    row: int
    scoring: bool
    order: int = field(default=0, compare=False)
    size: int = field(default=0, compare=False)

    @classmethod
    def load(cls, tx: Transaction, ticket: str) -> Letter | None:
        value = tx.get("dead", ticket)
        return None if value is None else cls(*value)

    def save(self, tx: Transaction, ticket: str) -> None:
        tx.put("dead", ticket, _values(self))


def _values(record: Facts | Group | Evaluation | Letter) -> list[Any]:
    """The fields of a record, in order; `astuple` would copy each deeply."""
    return [getattr(record, name) for name in record.__slots__]
