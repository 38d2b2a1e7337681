"""Heartbeats: a process shows its parent process that its main thread advances, so that the parent notices a hang.

A thread of the process renews the modification time of a file, which a process on another host can see in a shared
folder. The content of the file names the work that the process must finish before it may be killed, or is empty.
"""

from __future__ import annotations

import faulthandler
import fcntl
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from asyncrl.machine.doing import Doing, forget_doing
from asyncrl.machine.files import overwrite
from asyncrl.machine.process import STOP_S

logger = logging.getLogger(__name__)

VARIABLE = "ASYNCRL_HEARTBEAT"
"""The environment variable in which a process gets the path of its heartbeat."""
BEAT_S = 1.0
START_S = 300.0
"""A process has at least this long until its first heartbeat. It first loads libraries, which can take a minute from a
network disk."""
LONGEST_LOOK_S = 2.0
"""The seconds between two looks at a heartbeat count as silence, but never more than this. If more have passed, the
process that looks did not run for a while either."""
FINISH_S = 600.0
"""The longest time that a process which was asked to stop may take to finish work, such as a checkpoint."""
STACKS_S = 3.0
"""This many seconds before a process counts as hung, it writes the stacks of its threads to its log."""


class Activity:
    """The work of this process's main thread. Only that thread calls the methods, except `finishing`, which any thread
    may call. `clock` gives seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.advances = 0
        self.phase = "start"
        self.since = clock()
        """The time at which the phase began."""
        self.work = ""
        """A description of long work, with the remaining time."""
        self.silent, self.silent_since = "", 0.0
        """A part of the process that sends no heartbeats, and the time of its last heartbeat. The name is empty if all
        parts send heartbeats."""
        self.waits = True
        """True while the main thread waits for something that may take any time."""
        self.unfinished: list[str] = []
        """The work that must be finished before this process may be killed."""

    @property
    def doing(self) -> Doing:
        return Doing(self.phase, self.since, self.work, self.silent, self.silent_since)

    def miss(self, part: str, silent_s: float) -> None:
        """Record that a part of this process has sent no heartbeat for `silent_s`. An empty `part` means that all parts
        send heartbeats."""
        if part != self.silent:
            self.silent, self.silent_since = part, self._clock() - silent_s

    def advance(self) -> None:
        """Record that the main thread has advanced."""
        self.advances += 1

    def enter(self, phase: str) -> None:
        """Record the phase that begins now. Before the first phase the main thread never counts as stuck."""
        self.phase, self.since, self.waits = phase, self._clock(), False
        self.advance()

    def waiting(self) -> AbstractContextManager[None]:
        """Mark the block as a wait that may take any time, such as the wait for a batch."""
        return self._as(waits=True)

    def working(self) -> AbstractContextManager[None]:
        """Mark the block as work, even within a block of `waiting`."""
        return self._as(waits=False)

    @contextmanager
    def _as(self, waits: bool) -> Iterator[None]:
        before, self.waits = self.waits, waits
        self.advance()
        try:
            yield
        finally:
            self.waits = before
            self.advance()

    @contextmanager
    def finishing(self, what: str) -> Iterator[None]:
        """Mark the block as work that must be finished before this process may be killed. `what` names it."""
        self.unfinished.append(what)
        try:
            yield
        finally:
            self.unfinished.remove(what)


class Heartbeat:
    """Renews the file at `path` as long as `activity` advances or waits.

    - `hang_s`: the process counts as hung this many seconds after the last renewal of the file
    - `still_s`: if this is longer than `hang_s`, the process counts as hung only after the main thread has made no
      progress for this many seconds
    - `show`: writes the stacks of all threads, STACKS_S seconds before the process counts as hung
    """

    def __init__(
        self,
        path: Path,
        activity: Activity,
        hang_s: float,
        still_s: float = 0.0,
        show: Callable[[], None] = faulthandler.dump_traceback,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._activity, self._show, self._clock = path, activity, show, clock
        self._allowed_s, self._shown_s = max(0.0, still_s - hang_s), max(hang_s, still_s) - STACKS_S
        self._advances, self._advanced = -1, clock()
        self._is_shown = False
        self._written = ""
        self._doing: Doing | None = None

    def beat(self) -> None:
        """Renew the file, unless the main thread has made no progress for too long."""
        activity, now = self._activity, self._clock()
        if activity.waits or activity.advances != self._advances:
            self._advances, self._advanced, self._is_shown = activity.advances, now, False
        still_s = now - self._advanced
        if still_s >= self._shown_s and not self._is_shown:
            self._is_shown = True
            logger.error("the main thread has not advanced for %.0f s; the stacks of all threads follow", still_s)
            self._show()
        # On a full disk the first two writes may fail. The last one needs no room. Without it this process would seem
        # to hang, and would be killed.
        with self._unless_full():
            # This is another file, and no heartbeat. It is also written while the main thread hangs, and may name the
            # code that blocks the thread.
            if (doing := activity.doing) != self._doing:
                doing.write(self._path)
                self._doing = doing
        if still_s > self._allowed_s:
            return
        with self._unless_full():
            unfinished = ", ".join(activity.unfinished)
            if unfinished != self._written:
                # An empty file tells the supervisor that it may kill this process, because there is no work to finish.
                overwrite(self._path, unfinished.encode())
                self._written = unfinished
        with self._unless_full():
            os.utime(self._path)

    @contextmanager
    def _unless_full(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.debug("%s was not renewed: %s", self._path, error)


@contextmanager
def heartbeat(activity: Activity, hang_s: float, still_s: float = 0.0, stop_s: float = STOP_S) -> Iterator[None]:
    """Send heartbeats of `activity` during the block, if the process that started this process wants them. `hang_s` and
    `still_s`: see `Heartbeat`.

    Once the process that started this one has ended, no process would notice a hang. This process then has `stop_s`
    seconds to end, or `FINISH_S` if it must finish some work. After that it kills itself with its process group.
    """
    path = os.environ.pop(VARIABLE, None)  # Removed, so that children do not inherit it.
    if path is None:
        yield
        return
    over, shown = threading.Event(), Heartbeat(Path(path), activity, hang_s, still_s)
    _lock_until_the_end(Path(path))
    parent = os.getppid()

    def renew() -> None:
        alone_s = 0.0
        while not over.wait(BEAT_S):
            shown.beat()
            alone_s += BEAT_S if os.getppid() != parent else 0.0
            if alone_s >= (FINISH_S if activity.unfinished else stop_s):
                logger.error("the process that started this one has ended, and this one has not stopped; it is killed")
                os.killpg(0, signal.SIGKILL)

    shown.beat()
    threading.Thread(target=renew, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _lock_until_the_end(path: Path) -> None:
    """Hold a shared lock on the file until this process ends. A process in another container, which cannot see this
    process, tests the lock to know whether this process has ended."""
    with suppress(OSError):  # A disk may have no locks: then no process tests for this lock.
        fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_SH | fcntl.LOCK_NB)


class Pulse:
    """Watches the heartbeat of another process in the file at `path`. Make this object before that process starts.
    `clock` gives seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._looked = clock()
        self._silent_s = 0.0
        self._first = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
            forget_doing(path)
        except OSError as error:
            logger.warning("%s cannot be written, so a process that hangs is not noticed: %s", path, error)
        self._seen = self._changed()

    def is_lost(self, limit_s: float) -> bool:
        """True if there was no heartbeat for `limit_s` seconds. Before the first heartbeat, the limit is at least
        `START_S`. Call this often: of the time between two calls, at most `LONGEST_LOOK_S` counts."""
        now, seen = self._clock(), self._changed()
        self._silent_s += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        if seen != self._seen:
            self._seen, self._silent_s, self._first = seen, 0.0, False
        return self._seen is not None and self._silent_s >= (max(limit_s, START_S) if self._first else limit_s)

    @property
    def unfinished(self) -> str:
        """The work that the process must finish, or empty."""
        try:
            return self._path.read_text()
        except OSError:
            return ""

    def _changed(self) -> int | None:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return None
