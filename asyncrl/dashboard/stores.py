"""Reads the records of a run's replay while the run is running.

A process can have a store open only once, and the page answers several requests at a time. So all requests read through
this file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from msgspec import structs

from asyncrl.dashboard.plain import plain
from asyncrl.errors import RefusedError
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.failures import group_failures
from asyncrl.runs.inspect.table import describe_dead_letters
from asyncrl.runs.run import Run

T = TypeVar("T")

MOST_LETTERS = 500


class ReplayStores:
    """Opens the stores of a run for one question at a time, and closes them: a store that stays open keeps the replay
    from reusing its space."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def read(self, run: Run, ask: Callable[[StoredRun], T]) -> T:
        """Give the open stores to `ask`, and return its answer. Raises StoreError: there are none, or they cannot be
        read."""
        with self._lock, run.stored() as stored:
            return ask(stored)

    def alone(self) -> AbstractContextManager[object]:
        """Return a context manager for callers that open stores by themselves: within its `with` block, no other
        thread of this process opens a store."""
        return self._lock


def dead_letters(stored: StoredRun) -> dict[str, Any]:
    """Dead letters as plain values, the newest first, at most `MOST_LETTERS` of `total`; `reasons` counts all of them
    by their kind of reason, the most frequent first."""
    letters = stored.dead_letters()
    newest = sorted(letters, key=lambda each: each[1].order, reverse=True)[:MOST_LETTERS]
    return {
        "total": len(letters),
        "letters": plain(describe_dead_letters(newest)),
        "reasons": [
            {"scoring": group.scoring, "reason": group.reason, "count": len(group.ids)}
            for group in group_failures(letters)[:MOST_LETTERS]
        ],
    }


def record_of(stored: StoredRun, name: str) -> dict[str, Any] | None:
    """The permanent record that the replay has of a trajectory; `None` if it has none."""
    try:
        facts = stored.record(name).facts
    except RefusedError:
        return None
    return None if facts is None else plain(structs.asdict(facts))
