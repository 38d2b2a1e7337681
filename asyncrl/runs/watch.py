"""Finds out which role of a run waits for which, and what to change.

A caller that has a sample of the run gives it to a `StallReader`. Without a sample it uses a `RunWatch`, which opens
the stores for a moment: a process can open a store only once at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.errors import StoreError
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.advice import advise
from asyncrl.runs.finding import require_store
from asyncrl.runs.live import LiveReplay
from asyncrl.runs.run import Run
from asyncrl.runs.settings import ViewSettings
from asyncrl.runs.shares import idle_shares
from asyncrl.runs.situation import RolesReader, Situation, situation
from asyncrl.runs.stalls import Wait, chain, faults, sentence
from asyncrl.runs.status import StatusSample, sample

GIVE_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class Stalls:
    """The reasons why a run waits.

    - `waits`: the chain of waits;
    - `advice`: sentences for the user; `None` after too few steps, and while a fault stops the run;
    - `faults`: the roles that are silent or down, by name.
    """

    waits: Sequence[Wait] = ()
    advice: Sequence[str] | None = None
    faults: Mapping[str, Wait] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The chain as one sentence; empty if no role waits."""
        return sentence(self.waits)

    def values(self) -> dict[str, Any]:
        """The stalls as plain values: `waits` with who, what, seconds and fault of each link, `waits_text`, and
        `advice`."""
        return {"waits": [asdict(wait) for wait in self.waits], "waits_text": self.text, "advice": self.advice}


class StallReader:
    """Reads the stalls of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._roles = RolesReader(run)

    def read(self, now: StatusSample | None, settings: ViewSettings | None) -> Stalls:
        """Read the stalls at the time of the sample `now`, which is None if the run has no store yet. A run that has
        ended, or that has no configuration, has no waits."""
        if settings is None:
            return Stalls()
        seen = idle_shares(self._run)
        advice = None if seen is None else advise(seen, settings)
        supervised = self._run.is_running()
        if not supervised and (now is None or not now.live):
            return Stalls(advice=advice)
        roles = self._roles.read(self._run.processes(), settings.replay.shards) if supervised else {}
        seen_now = Situation([], roles) if now is None else situation(now, settings, roles)
        waits = chain(seen_now)
        # If a role is at fault, the others are idle because of it, and the advice would be wrong.
        held_up = any(wait.fault for wait in waits)
        return Stalls(waits, None if held_up else advice, faults(seen_now))


class RunWatch:
    """Reads the stalls of a run. Each look asks a running replay for its state, and waits at most `give_up_s` seconds
    for the answer."""

    def __init__(self, run: Run, give_up_s: float = GIVE_UP_S) -> None:
        self.run, self._give_up_s = run, give_up_s
        self._reader = StallReader(run)
        self._lock = threading.Lock()

    def look(self) -> Stalls:
        """The stalls now; several threads may ask. Raises AsyncrlError, OSError or lmdb.Error: the folder or the store
        cannot be read."""
        with self._lock:
            return self._look()

    def _look(self) -> Stalls:
        settings = self.run.settings()
        try:
            require_store(self.run)
            stored = StoredRun(self.run.store)
        except StoreError:
            return self._reader.read(None, settings)
        with closing(stored):
            now = sample(stored, LiveReplay(self.run, stored, self._give_up_s), time.monotonic())
            return self._reader.read(now, settings)
