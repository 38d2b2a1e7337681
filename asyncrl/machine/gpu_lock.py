"""Locks on the GPUs that learner and servers use by turns. The kernel frees the locks of a process when it dies.

    the learner's ranks:  ask ──no actor has the GPUs──► use them ──► give_back(version)
    an actor:             take ──no rank asks──► its servers use them ──is_wanted──► its servers free them ──► give_back

These rules hold:

- Learner and servers never use the GPUs at the same time. A rank first locks its own file exclusively, and then looks
  for an actor's shared lock on the servers' file. An actor first locks the servers' file, and then looks for ranks. So
  at most one of them finds the other's file free.
- The learner comes first: as soon as it asks, actors wait.
- The lock of a process ends with the process, however it dies. Servers and their guards (guard.py) inherit the lock of
  their actor. So the lock lasts until the last process of the actor's servers has ended.

All processes must be on one machine, or the folder's file system must share locks between machines.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

SERVERS = "servers"


class LearnerLock:
    """The lock of one of the learner's ranks in `folder`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._own = _opened(_of_rank(folder, rank))
        self._servers = _opened(folder / SERVERS)

    def ask(self) -> None:
        """Request the GPUs. From now until `give_back`, no actor can take them."""
        # This may wait for some microseconds: an actor that tests the lock holds it for as long.
        fcntl.flock(self._own, fcntl.LOCK_EX)

    def is_ours(self) -> bool:
        """True if no actor has the GPUs. Call this after every rank has asked."""
        if not _try(self._servers, fcntl.LOCK_EX):
            return False
        fcntl.flock(self._servers, fcntl.LOCK_UN)
        return True

    def give_back(self, version: int) -> None:
        """Let the servers use the GPUs. Call this when they can load `version`."""
        os.pwrite(self._own, f"{version:020d}".encode(), 0)
        fcntl.flock(self._own, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._own)
        os.close(self._servers)


class ServersLock:
    """The lock of one actor in `folder`, for GPUs that it shares with `ranks` learner ranks."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._own = _opened(folder / SERVERS)
        self._ranks = [_opened(_of_rank(folder, rank)) for rank in range(ranks)]

    @property
    def file(self) -> int:
        """The descriptor that holds the lock: it stays locked until every process that inherited it has ended, or
        `give_back` is called."""
        return self._own

    def take(self) -> bool:
        """Take the GPUs, if no rank wants them and a version was already published. Returns True if this actor has the
        GPUs."""
        # This also fails during the few microseconds in which the learner's rank 0 tests the lock.
        if self.version() < 0 or not _try(self._own, fcntl.LOCK_SH):
            return False
        if self.is_wanted():
            self.give_back()
            return False
        return True

    def is_wanted(self) -> bool:
        """True if a rank holds the GPUs or waits for them."""
        for file in self._ranks:
            if not _try(file, fcntl.LOCK_SH):
                return True
            fcntl.flock(file, fcntl.LOCK_UN)
        return False

    def give_back(self) -> None:
        """Give the GPUs back. Call this only when no server uses them any more."""
        fcntl.flock(self._own, fcntl.LOCK_UN)

    def version(self) -> int:
        """Return the version that the learner's rank 0 gave with its last `give_back`, or -1 before the first."""
        with suppress(ValueError):
            return int(os.pread(self._ranks[0], 20, 0))
        return -1

    def close(self) -> None:
        for file in (self._own, *self._ranks):
            os.close(file)


def _opened(path: Path) -> int:
    """Open a descriptor that programs do not inherit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _of_rank(folder: Path, rank: int) -> Path:
    return folder / f"learner-{rank}"


def _try(file: int, lock: int) -> bool:
    try:
        fcntl.flock(file, lock | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
