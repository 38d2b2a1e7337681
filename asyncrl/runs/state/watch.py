"""Finds out which role of a run waits for which, and what to change.

A caller that has a sample of the run gives it to a `StallReader`. Without a sample it uses a `RunWatch`, which opens
the stores for a moment: a process can open a store only once at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import disk_usage
from typing import Any

from asyncrl.errors import StoreError
from asyncrl.replay.store.environment import NO_ROOM_BYTES
from asyncrl.runs.elapsed import newest_start
from asyncrl.runs.finding import require_store
from asyncrl.runs.role_errors import RECENT_BYTES, RoleErrors
from asyncrl.runs.run import Run
from asyncrl.runs.settings import ViewSettings
from asyncrl.runs.shares import idle_shares
from asyncrl.runs.state.advice import advise
from asyncrl.runs.state.live import LiveReplay
from asyncrl.runs.state.situation import RolesReader, Situation, situation
from asyncrl.runs.state.stalls import Wait, chain, faults, sentence
from asyncrl.runs.state.status import StatusSample, sample

GIVE_UP_S = 2.0


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of a folder."""
    return disk_usage(folder).free


@dataclass(frozen=True, slots=True)
class Stalls:
    """The reasons why a run waits.

    - `waits`: the chain of waits;
    - `advice`: sentences for the user; `None` until enough steps are done, and while a fault stops the run;
    - `faults`: the roles that are silent or down, by name;
    - `errors`: the newest errors in the logs of roles, each with its age.
    """

    waits: Sequence[Wait] = ()
    advice: Sequence[str] | None = None
    faults: Mapping[str, Wait] = field(default_factory=dict)
    errors: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The chain as one sentence; empty if no role waits."""
        return sentence(self.waits)

    def values(self) -> dict[str, Any]:
        """The stalls as plain values: `waits` with who, what, seconds and fault of each link, `waits_text`, `advice`
        and `errors`."""
        return {
            "waits": [asdict(wait) for wait in self.waits],
            "waits_text": self.text,
            "advice": self.advice,
            "errors": self.errors,
        }


class StallReader:
    """Reads the stalls of a run. `clock` gives seconds since 1970, and `free` the free bytes of a folder's disk."""

    def __init__(
        self, run: Run, clock: Callable[[], float] = time.time, free: Callable[[Path], int] = free_bytes
    ) -> None:
        self._run, self._clock, self._free = run, clock, free
        self._roles, self._errors = RolesReader(run, clock), RoleErrors(run.folder, most_bytes=RECENT_BYTES)

    def read(self, now: StatusSample | None, settings: ViewSettings | None) -> Stalls:
        """Read the stalls at the time of the sample `now`, which is None if the run has no store yet. A run that has
        ended, or that has no configuration, has no waits."""
        if settings is None:
            return Stalls()
        seen = idle_shares(self._run)
        advice = None if seen is None else advise(seen, settings)
        supervised = self._run.is_running()
        if not supervised and (now is None or not now.live):
            return Stalls(advice=advice, errors=self.errors())
        roles = self._roles.read(self._run.processes(), settings.replay.shards) if supervised else {}
        seen_now = Situation([], roles) if now is None else situation(now, settings, roles)
        errors = self.errors()
        waits = chain(seen_now)
        if supervised and not (waits and waits[-1].fault):
            waits = self._with_room_wait(waits)
        # If a role is at fault, the others are idle because of it, and the advice would be wrong.
        held_up = any(wait.fault for wait in waits)
        return Stalls(waits, None if held_up else advice, faults(seen_now), errors)

    def errors(self) -> list[str]:
        """The newest errors in the logs of the run's roles, each with its age."""
        self._errors.read()
        now = self._clock()
        return [error.aged(now) for error in self._errors.newest(newest_start(self._run), now)]

    def _with_room_wait(self, waits: Sequence[Wait]) -> list[Wait]:
        """The chain, down to the role that has waited for room on a disk for longest. If no log names such a role, but
        the run's disk is full, the chain ends with the full disk: a role may have been unable to write its log."""
        found = sorted(self._errors.waits_since(newest_start(self._run)), key=lambda wait: wait.since)
        for each in found[:1]:
            what, seconds = f"waits for room on the disk to write {each.what}", self._clock() - each.since
            others = [wait for wait in waits if wait.who != each.role]  # It does nothing else.
            return [*others, Wait(each.role, what, seconds, fault=True)]
        if waits and (free := self._free(self._run.folder)) < NO_ROOM_BYTES:
            full = f"the disk of {self._run.folder} is full, {free} bytes are left (make room, and the run goes on)"
            return [*waits, Wait("", full, fault=True)]
        return list(waits)


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

    def errors(self) -> list[str]:
        """The newest errors in the logs of the run's roles."""
        with self._lock:
            return self._reader.errors()

    def _look(self) -> Stalls:
        settings = self.run.settings()
        with ExitStack() as stack:
            try:
                require_store(self.run)
                stored = stack.enter_context(self.run.stored())
            except StoreError:
                return self._reader.read(None, settings)
            now = sample(stored, LiveReplay(self.run, stored, self._give_up_s), time.monotonic())
            return self._reader.read(now, settings)
