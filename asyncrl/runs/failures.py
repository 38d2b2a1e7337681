"""Groups the failures of a run by their reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.replay.store.records import DeadLetter, TrajectoryRecord, TrajectoryState
from asyncrl.replay.store.transaction import Transaction
from asyncrl.text import kind_of

EPISODE, SCORING, SKIPPED_PLAN = KINDS = ("episode", "scoring", "skipped plan")
"""The kinds of dead letters, by what was given up. A dead letter of an episode has no trajectory."""
GIVEN_UP = "given up"
"""The word for trajectories that are dead letters: they could not be scored, or were left out by hand."""


def count_letters(tx: Transaction) -> Counter[str]:
    """Count the dead letters of a store by their kind."""
    return Counter(_kind(tx, name, letter) for name, letter in DeadLetter.all(tx))


def _kind(tx: Transaction, name: str, letter: DeadLetter) -> str:
    if letter.scoring:
        return SCORING
    return SKIPPED_PLAN if tx.size(TrajectoryRecord.table, name) else EPISODE


def shown_end(name: str) -> str:
    """The word for a final state of trajectories. It is not "dead", since failed attempts at episodes are dead, too."""
    return GIVEN_UP if name == TrajectoryState.DEAD else name


@dataclass(frozen=True)
class FailureGroup:
    """Failures of one kind.

    - `scoring`: true if the scoring failed, and not the episode
    - `reason`: the newest reason
    - `ids`: the failed attempts, the newest first
    """

    scoring: bool
    reason: str
    ids: tuple[str, ...]


def group_failures(letters: Iterable[tuple[str, DeadLetter]]) -> list[FailureGroup]:
    """Group dead letters, the records of failed attempts, by kind. The most frequent kind comes first."""
    groups: dict[tuple[bool, str], list[tuple[str, DeadLetter]]] = {}
    for name, letter in sorted(letters, key=lambda each: each[1].order, reverse=True):
        groups.setdefault((letter.scoring, kind_of(letter.reason)), []).append((name, letter))
    found = [
        FailureGroup(scoring, members[0][1].reason, tuple(name for name, _ in members))
        for (scoring, _), members in groups.items()
    ]
    return sorted(found, key=lambda each: len(each.ids), reverse=True)
