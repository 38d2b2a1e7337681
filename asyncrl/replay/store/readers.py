"""Watches other processes that read the store, such as an export, `asyncrl status` or a learner with `replay.source`.

LMDB reuses a freed page only when no reader's snapshot can still need it. A reader that was killed during a transaction
leaves its snapshot in use, and the file would grow until every write is refused. `Readers` frees such snapshots. It
reports a live reader that keeps one snapshot for LONG_S.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from asyncrl.masking import masked_text
from asyncrl.replay.store.environment import ReadSnapshot
from asyncrl.replay.store.transaction import Transaction

log = logging.getLogger(__name__)

LONG_S = 60.0


@dataclass(frozen=True, slots=True)
class SlowReader:
    """A process that has been reading one snapshot for `seconds`. `command` is its command line, or empty if it is not
    visible."""

    pid: int
    command: str
    seconds: float


class Readers:
    """Watches the readers of one store. `dead` counts the freed snapshots of ended processes. `clock` gives monotonic
    seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[ReadSnapshot, float] = {}
        self._commands: dict[ReadSnapshot, str] = {}
        self.dead = 0

    def free_dead(self, tx: Transaction) -> int:
        """Free the snapshots of processes that have ended, and return their number."""
        freed = tx.free_dead_readers()
        if freed:
            self.dead += freed
            log.warning("freed %d snapshots of the store: the processes that read them were killed", freed)
        return freed

    def look(self, tx: Transaction) -> None:
        """Free the snapshots of dead processes, and note which live processes read an old snapshot."""
        self.free_dead(tx)
        now = self._clock()
        self._since = {each: self._since.get(each, now) for each in tx.old_snapshots()}
        long = [each for each, since in self._since.items() if now - since >= LONG_S]
        self._commands = {each: self._commands[each] if each in self._commands else _named(each) for each in long}

    def lingering(self) -> list[SlowReader]:
        """The processes that had been reading one snapshot for too long at the last look."""
        now = self._clock()
        return [SlowReader(each.pid, command, now - self._since[each]) for each, command in self._commands.items()]


def _named(snapshot: ReadSnapshot) -> str:
    """Log a warning about a slow reader, and return its command line."""
    try:
        command = masked_text(" ".join(psutil.Process(snapshot.pid).cmdline()))
    except psutil.Error:
        command = ""
    log.warning(
        "process %d (%s) has read one snapshot of the store for over %.0f s: until it ends, no freed space is reused "
        "and the file grows",
        snapshot.pid,
        command or "command line not visible",
        LONG_S,
    )
    return command
