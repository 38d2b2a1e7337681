"""The ownership of a run's folder by one process, and how another process asks it to stop.

The file `supervised` is locked, and names the process, as long as one starts roles for the folder. A process that wants
it to stop makes the file `stop`, which also works over a shared folder. The process renames it to `stopping`, and
removes that when all roles have ended.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.machine.files import missing_folders, remove_empty
from asyncrl.machine.owner import OWNER_FILE, Owner, owner_of

STOP_FILE, STOPPING_FILE = "stop", "stopping"
LOOK_S = 1.0
"""Between two looks for a request: a shared folder should not be asked more often."""
POLL_S = 0.2
LEFT_S = 10.0
"""Longer than an owner takes to write its name, and to end when the run is done."""
TRIES = 10
"""The tries to lock the file of an owner that removes it at the same time."""
MOST_TRIES = 150
"""The tries to lock a file without an owner, which another process has locked to look at it."""
LOOKING_S = 0.02
"""Longer than it takes to look whether a folder has an owner."""
SILENT_S = 90.0
"""A network disk may show a new file as late as this."""


class NotRunningError(AsyncrlError):
    """No process runs the folder."""


@contextmanager
def exclusively(run_dir: Path) -> Iterator[None]:
    """Own the run folder. Where nothing was started there, it is removed, with the folders that were made for it.

    Raises ConfigError: another process owns it, or the folder cannot be written or locked.
    """
    made = missing_folders(run_dir)
    try:
        opened = _locked(run_dir)
    except BlockingIOError as error:
        raise ConfigError(
            f"{run_dir} is being run by another process; stop it with `asyncrl stop {run_dir}`, or choose another "
            "run.name"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{run_dir} cannot be run: {error}; set run.dir to a folder on a disk that can be written, has room and "
            "has locks (flock)"
        ) from error
    with opened as lock:
        try:
            yield
        finally:
            for name in (STOP_FILE, STOPPING_FILE):
                (run_dir / name).unlink(missing_ok=True)
            lock.truncate(0)
            if list(run_dir.iterdir()) == [run_dir / OWNER_FILE]:  # Nothing started.
                shutil.rmtree(run_dir)
                remove_empty(made[1:])


def _locked(run_dir: Path) -> TextIO:
    """The owner's file, locked, with the name of this process. Raises BlockingIOError: another process has it; OSError.

    An owner that started nothing removes the folder. A process that makes the folder at that moment, or has locked a
    file that is deleted by now, tries again.
    """
    path = run_dir / OWNER_FILE
    for _ in range(TRIES):
        with suppress(FileNotFoundError), ExitStack() as stack:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.open("a+"))
            _lock(lock)
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                lock.truncate(0)
                # Unbuffered: where there is no room, closing the file must not fail as well.
                os.write(lock.fileno(), json.dumps(asdict(Owner(socket.gethostname(), os.getpid()))).encode())
                (run_dir / STOP_FILE).unlink(missing_ok=True)
                stack.pop_all()
                return lock
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(path))


def _lock(file: TextIO) -> None:
    """Lock the file. A process that only checks for an owner holds the lock for a moment, or for longer on a busy
    processor. Raises BlockingIOError: another process has it; ConfigError: one has looked for seconds.
    """
    owned = 0
    for _ in range(MOST_TRIES):
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owned += not _is_looked_at(file)
        if owned == TRIES:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), file.name)
        time.sleep(LOOKING_S)
    raise ConfigError(
        f"{file.name}: another process looks at it, and does not go on; end it, such as a stopped `asyncrl inspect`"
    )


def _is_looked_at(file: TextIO) -> bool:
    """True if the locked file seems to have no owner at this moment: a process has locked it to look at it."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def is_asked_to_stop(run_dir: Path) -> bool:
    """True if a process has asked the owner of the folder to stop, which then starts nothing."""
    return (run_dir / STOP_FILE).exists()


@contextmanager
def stop_of_start(run_dir: Path, stop: threading.Event) -> Iterator[threading.Event]:
    """An event for the checks of a start: it is set as soon as `stop` is, and within LOOK_S of a request to the owner
    of the folder. `stop` itself is not set by a request, and so tells that a signal came."""
    asked, is_over = threading.Event(), threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            if stop.wait(LOOK_S) or is_asked_to_stop(run_dir):
                asked.set()
                return

    if stop.is_set():
        asked.set()
    threading.Thread(target=watch, name="stop-of-start", daemon=True).start()
    try:
        yield asked
    finally:
        is_over.set()


class StopRequests:
    """Tells the owner of the folder whether it was asked to stop. `clock` gives seconds."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._looked = clock()

    def arrived(self) -> bool:
        """True if a request has arrived, which this call takes."""
        if self._clock() - self._looked < LOOK_S:
            return False
        self._looked = self._clock()
        try:
            (self._run_dir / STOP_FILE).rename(self._run_dir / STOPPING_FILE)
        except FileNotFoundError:
            return False
        return True


def stop(run_dir: Path, show: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
    """Ask the owner of the folder to stop, and return once it has ended. `show` is told what this waits for.

    Raises NotRunningError: no process runs it, or its owner ended before it could stop.
    """
    owner = owner_of(run_dir)
    if owner is None:
        raise NotRunningError(
            f"no `asyncrl train` runs {run_dir}; end roles that were started by hand with Ctrl-C or SIGTERM"
        )
    request, taken = run_dir / STOP_FILE, run_dir / STOPPING_FILE
    who = f"process {owner.pid} on {owner.host}"
    if not taken.exists():
        request.touch()
    show(f"{who} was asked to stop {run_dir}; this waits until it has")
    asked, is_shown = clock(), False
    while (there := owner_of(run_dir) == owner) or request.exists() or taken.exists():
        if not there:
            for path in (request, taken):
                path.unlink(missing_ok=True)
            raise NotRunningError(f"{who} ended before it stopped {run_dir}: its roles have ended with it")
        if not is_shown and request.exists() and clock() - asked > SILENT_S:
            show(f"{who} has not taken the request for {SILENT_S:.0f} s: look whether it still runs there")
            is_shown = True
        time.sleep(POLL_S)


class OwnerWatch:
    """Tells whether the owner of a folder, once there was one, has ended it well. `clock` gives seconds."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = run_dir / OWNER_FILE, clock
        self._looked, self._owned_until = clock(), math.inf

    def has_left(self) -> bool:
        """True if the folder had no owner for `LEFT_S`. A killed process owns it until the next one does."""
        now = self._clock()
        if now - self._looked >= LOOK_S:
            self._looked = now
            with suppress(FileNotFoundError):
                if self._file.read_text():
                    self._owned_until = now
        return now - self._owned_until >= LEFT_S
