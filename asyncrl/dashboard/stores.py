"""What the replay of a run has recorded, read while the run goes on. A process can have a store open only once, and the
page answers several requests at a time, so all of them read through here."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from msgspec import structs

from asyncrl.dashboard.plain import plain
from asyncrl.errors import RefusedError
from asyncrl.replay.stored import StoredRun
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
        """What `ask` says of the stores. Raises StoreError: there are none, or they cannot be read."""
        with self._lock, run.stored() as stored:
            return ask(stored)

    def alone(self) -> AbstractContextManager[object]:
        """A block in which nobody else of this process opens stores, for who opens them by itself."""
        return self._lock


def dead_letters(stored: StoredRun) -> dict[str, Any]:
    """Dead letters as plain values, the newest first, at most `MOST_LETTERS` of `total`; `reasons` counts all of them
    by their reason, the most frequent first."""
    letters = stored.dead_letters()
    newest = sorted(letters, key=lambda each: each[1].order, reverse=True)[:MOST_LETTERS]
    reasons = Counter((letter.scoring, letter.reason) for _, letter in letters)
    return {
        "total": len(letters),
        "letters": plain(describe_dead_letters(newest)),
        "reasons": [
            {"scoring": scoring, "reason": reason, "count": count}
            for (scoring, reason), count in reasons.most_common(MOST_LETTERS)
        ],
    }


def record_of(stored: StoredRun, name: str) -> dict[str, Any] | None:
    """What the replay knows of a trajectory for good; None: nothing."""
    try:
        facts = stored.record(name).facts
    except RefusedError:
        return None
    return None if facts is None else plain(structs.asdict(facts))
