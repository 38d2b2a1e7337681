"""Looks at a run again and again: who waits for whom, and what to change.

Who has a sample of the run already reads it with a `StallReader`. Who has none asks a `RunWatch`, which opens the
stores for a moment; a process can open a store only once at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config.locations import CONFIG_FILE
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import StoreError
from asyncrl.machine.owner import owner_of
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.advice import advise
from asyncrl.runs.inspect.run import ConfigFile, LiveReplay, find
from asyncrl.runs.shares import idle_shares
from asyncrl.runs.situation import RolesReader, Situation, situation
from asyncrl.runs.stalls import Wait, chain, faults, sentence
from asyncrl.runs.status import StatusSample, processes_of, sample

GIVE_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class Stalls:
    """The chain of `waits`, and `advice`; None where too few steps are done to advise anything, and while a fault holds
    the run up. `faults` are the roles that are silent or down, by name."""

    waits: Sequence[Wait] = ()
    advice: Sequence[str] | None = None
    faults: Mapping[str, Wait] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The chain as one sentence; empty where nobody waits."""
        return sentence(self.waits)

    def values(self) -> dict[str, Any]:
        """As plain values: `waits` with who, what, seconds and fault of each link, `waits_text`, and `advice`."""
        return {"waits": [asdict(wait) for wait in self.waits], "waits_text": self.text, "advice": self.advice}


class StallReader:
    """Reads the stalls of the run in a folder."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._roles = RolesReader(run_dir)

    def read(self, now: StatusSample | None, config: TrainConfig | None) -> Stalls:
        """Those at the moment of a sample; None: the run has no store yet. Of a run that has ended or has no
        configuration there are no waits."""
        if config is None:
            return Stalls()
        seen = idle_shares(self._run_dir)
        advice = None if seen is None else advise(seen, config)
        supervised = owner_of(self._run_dir) is not None
        if not supervised and (now is None or not now.live):
            return Stalls(advice=advice)
        roles = self._roles.read(processes_of(self._run_dir), config.replay.shards) if supervised else {}
        seen_now = Situation([], roles) if now is None else situation(now, config, roles)
        waits = chain(seen_now)
        # The idle shares are those of the fault.
        held_up = any(wait.fault for wait in waits)
        return Stalls(waits, None if held_up else advice, faults(seen_now))


class RunWatch:
    """Asks the replay of a run, if it runs, for up to `give_up_s` seconds at each look."""

    def __init__(self, run_dir: Path, give_up_s: float = GIVE_UP_S) -> None:
        self._run_dir, self._give_up_s = run_dir, give_up_s
        self._reader = StallReader(run_dir)
        self.config = ConfigFile(run_dir / CONFIG_FILE)
        self._lock = threading.Lock()

    def look(self) -> Stalls:
        """The stalls now; several threads may ask. Raises AsyncrlError, OSError or lmdb.Error: the folder or the store
        cannot be read."""
        with self._lock:
            return self._look()

    def _look(self) -> Stalls:
        config = self.config.read()
        try:
            run = find(str(self._run_dir), None, config=config)
            stored = StoredRun(run.folder)
        except StoreError:
            return self._reader.read(None, config)
        with closing(stored):
            return self._reader.read(sample(stored, LiveReplay(run, stored, self._give_up_s), time.monotonic()), config)
