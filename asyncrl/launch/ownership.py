"""Lets one process own a run's folder, and lets other processes ask the owner to stop.

The owner keeps the file `supervised` locked while it runs roles, and writes its host and process id into the file.
Another process, even on another host that shares the folder, asks the owner to stop by making the file `stop`. The
owner renames `stop` to `stopping`, and removes `stopping` when all roles have ended.
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
"""The pause between two looks for a request, long enough to spare a shared file system."""
POLL_S = 0.2
LEFT_S = 10.0
"""The owner of a folder counts as ended if the folder has had no owner for this many seconds. By then a restarted owner
has written its name, and the ranks of a finished run have ended."""
TRIES = 10
"""The maximum number of attempts to lock a file while its owner keeps it locked, or removes it."""
MOST_TRIES = 150
"""The maximum number of attempts to lock a file while another process holds a shared lock to check if the folder has an
owner."""
LOOKING_S = 0.02
"""The pause between two attempts, longer than a check for an owner takes."""
SILENT_S = 90.0
"""A network file system may take this long to show a new file to another host."""


class NotRunningError(AsyncrlError):
    """No process runs the folder."""


@contextmanager
def exclusively(run_dir: Path) -> Iterator[None]:
    """Own the run folder. If nothing was started there, the folder is removed at the end, and so are the parent folders
    that were made for it.

    Raises ConfigError: another process owns the run folder, or the folder cannot be written or locked.
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
            f"{run_dir} cannot be run: {error}; set run.dir to a writable folder on a disk with free space and file "
            "locks (flock)"
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
    """Lock the owner's file, and write the host and the id of this process into it. Raises BlockingIOError: another
    process has locked it; OSError: it cannot be written.

    An owner that started nothing removes the folder. If that happens during this call, the call tries again.
    """
    path = run_dir / OWNER_FILE
    for _ in range(TRIES):
        with suppress(FileNotFoundError), ExitStack() as stack:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.open("a+"))
            _lock(lock)
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                lock.truncate(0)
                # This write is not buffered, so that on a full disk it fails here, and not when the file is closed.
                os.write(lock.fileno(), json.dumps(asdict(Owner(socket.gethostname(), os.getpid()))).encode())
                (run_dir / STOP_FILE).unlink(missing_ok=True)
                stack.pop_all()
                return lock
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(path))


def _lock(file: TextIO) -> None:
    """Lock the file. This waits for a process that only checks for an owner, and holds a shared lock for a moment.
    Raises BlockingIOError: another process owns the folder; ConfigError: a check holds its lock for seconds.
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
        f"{file.name}: another process reads it and does not finish; end that process, such as a suspended "
        "`asyncrl inspect`"
    )


def _is_looked_at(file: TextIO) -> bool:
    """True if the lock on the file is a shared one. Then the process that holds it only checks for an owner."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def is_asked_to_stop(run_dir: Path) -> bool:
    """True if the owner of the folder was asked to stop, and has not taken the request yet."""
    return (run_dir / STOP_FILE).exists()


@contextmanager
def stop_of_start(run_dir: Path, stop: threading.Event) -> Iterator[threading.Event]:
    """Yield an event that interrupts the checks before a run starts. It is set when `stop` is set, and within LOOK_S
    seconds of a stop request in the folder. A request does not set `stop`, so the caller can tell it from a signal."""
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
    """Looks for requests that ask the owner of the folder to stop. `clock` gives seconds."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._looked = clock()

    def arrived(self) -> bool:
        """Take a request, and return True if there was one."""
        if self._clock() - self._looked < LOOK_S:
            return False
        self._looked = self._clock()
        try:
            (self._run_dir / STOP_FILE).rename(self._run_dir / STOPPING_FILE)
        except FileNotFoundError:
            return False
        return True


def stop(run_dir: Path, show: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
    """Ask the owner of the folder to stop, and return once it has ended. `show` gets lines about the wait.

    Raises NotRunningError: no process runs the folder, or the owner ended before it could stop the run.
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
    show(f"asked {who} to stop {run_dir}; waiting until it has ended")
    asked, is_shown = clock(), False
    while (there := owner_of(run_dir) == owner) or request.exists() or taken.exists():
        if not there:
            for path in (request, taken):
                path.unlink(missing_ok=True)
            raise NotRunningError(f"{who} ended before it stopped {run_dir}: its roles have ended with it")
        if not is_shown and request.exists() and clock() - asked > SILENT_S:
            show(f"{who} has not reacted for {SILENT_S:.0f} s; check that it still runs")
            is_shown = True
        time.sleep(POLL_S)


class OwnerWatch:
    """Tells if the owner of a folder has ended without being killed. `clock` gives seconds."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = run_dir / OWNER_FILE, clock
        self._looked, self._owned_until = clock(), math.inf

    def has_left(self) -> bool:
        """True if the folder had an owner, and has had none for `LEFT_S` seconds. A killed owner still counts as the
        owner, because its name stays in the file until the next owner writes its own."""
        now = self._clock()
        if now - self._looked >= LOOK_S:
            self._looked = now
            with suppress(FileNotFoundError):
                if self._file.read_text():
                    self._owned_until = now
        return now - self._owned_until >= LEFT_S
