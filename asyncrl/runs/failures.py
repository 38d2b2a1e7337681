"""Groups the failures of a run by their reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.replay.records import DeadLetter
from asyncrl.text import kind_of


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
