"""Ends the processes that an earlier supervisor of a run has left running, so that no role runs twice.

When a supervisor is killed, the kernel asks its roles to stop, but a learner that saves may run for minutes.
`processes.json` in the run's folder names the processes. Processes of this machine are asked to end, and killed after a
while. A process of another machine is ended by a launcher that can reach it, or ends when its lease expires.

`starting_alone` does the same for one role, whose Ray actor was killed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from asyncrl.config.locations import ALIVE_FOLDER, PROCESSES_FILE
from asyncrl.errors import ConfigError, StoppedError, UnavailableError
from asyncrl.machine.activity import FINISH_S
from asyncrl.machine.activity import VARIABLE as HEARTBEAT_VARIABLE
from asyncrl.machine.identity import ProcessIdentity, boot_of, this_kernel
from asyncrl.machine.owner import OWNER_FILE
from asyncrl.machine.process import STOP_S
from asyncrl.runs.processes import ProcessRecord, read_records

log = logging.getLogger(__name__)

POLL_S = 0.1
KILLED_S = 30.0
"""The longest wait for a killed process to end: a process that hangs in the kernel may never end."""


class Survivor:
    """A role's process that an earlier supervisor left running, with its children; `beats` is the file of its
    heartbeat."""

    def __init__(self, name: str, process: ProcessIdentity, beats: Path) -> None:
        self.name, self._process, self._beats = name, process, beats
        self._family = [process, *process.descendants()]

    def __str__(self) -> str:
        return f"{self.name}, process {self._process.pid}"

    @property
    def unfinished(self) -> str:
        """The unfinished work that the process names in its heartbeat file; empty if there is none."""
        try:
            return self._beats.read_text()
        except OSError:
            return ""

    def ask_to_end(self) -> None:
        self._process.ask_to_end()

    def has_ended(self) -> bool:
        """True if the process and its children have ended. If the process has ended and a child has not, the child is
        killed."""
        if not self._process.is_alive:
            self.kill()
        return not any(each.is_alive for each in self._family)

    def kill(self) -> None:
        for each in self._family:
            each.kill()


def end_here(
    run_dir: Path, stop: threading.Event | None = None, stop_s: float = STOP_S, finish_s: float = FINISH_S
) -> None:
    """End the roles of the folder that still run on this machine. Only the folder's owner may call this."""
    alive = {record.identity: name for name, record in read_records(run_dir).items() if record.identity.is_alive}
    alive_folder = run_dir / ALIVE_FOLDER
    left = [Survivor(name, each, alive_folder / name) for each, name in (_found(alive_folder) | alive).items()]
    end_all(left, stop or threading.Event(), stop_s, finish_s)


@contextmanager
def starting_alone(beats: Path) -> Iterator[None]:
    """Let the block start the role whose heartbeat is the file `beats`. Before the block, this ends the role's
    processes of an earlier start on this machine. During the block, no other process of this machine starts the role.

    Raises UnavailableError: a killed process does not end.
    """
    beats.parent.mkdir(parents=True, exist_ok=True)
    with beats.with_name(f"{beats.name}.start").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        earlier = [each for each, name in _found(beats.parent).items() if name == beats.name]
        end_all([Survivor(beats.name, each, beats) for each in earlier], threading.Event())
        yield


def _found(alive: Path) -> dict[ProcessIdentity, str]:
    """Find the processes of this machine that were started as roles with a heartbeat in the folder `alive`. Return the
    name of the role for each process.

    `processes.json` does not suffice: it lacks a process that started while the disk was full, or just before the
    supervisor was killed."""
    found = {}
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            beats = each.environ().get(HEARTBEAT_VARIABLE)
            is_role = beats and each.pid != os.getpid() and Path(beats).parent.samefile(alive)
            if is_role and (identity := ProcessIdentity.of(each.pid)):
                found[identity] = Path(beats).name
    return found


def end_all(
    left: Collection[Survivor], stop: threading.Event, stop_s: float = STOP_S, finish_s: float = FINISH_S
) -> None:
    """Ask processes to end, and return when all have. A process is killed after `stop_s` seconds, or after `finish_s`
    seconds if it still has unfinished work.

    Raises StoppedError: `stop` was set meanwhile; UnavailableError: a killed process does not end.
    """
    asked = time.monotonic()
    for each in left:
        log.warning("%s still runs, without its supervisor; it must end before anything starts", each)
        each.ask_to_end()
    waits: set[str] = set()
    late: set[str] = set()
    while left := [each for each in left if not each.has_ended()]:
        elapsed = time.monotonic() - asked
        if elapsed >= finish_s + KILLED_S:
            raise UnavailableError(f"{', '.join(map(str, left))}: killed, but it does not end; nothing was started")
        for each in left:
            what = each.unfinished
            if what and elapsed < finish_s:
                if what not in waits:
                    log.warning("%s finishes %s; waiting up to %g s for it", each, what, finish_s)
                waits.add(what)
            elif elapsed >= stop_s:
                if each.name not in late:
                    log.warning("%s did not end in time; killing it", each)
                late.add(each.name)
                each.kill()
        if stop.wait(POLL_S):
            raise StoppedError("stopped while it waited for processes of an earlier start")


def end_elsewhere(
    run_dir: Path, end_there: Callable[[threading.Event], Collection[str]], stop: threading.Event
) -> None:
    """Wait until no role of the folder runs on another machine. `end_there` ends the roles on the machines that it can
    reach, and returns the kernel ids (`ProcessIdentity.kernel`) of these machines. On other machines roles end when
    their leases expire.

    Raises StoppedError: `stop` was set meanwhile; ConfigError: a supervisor on another machine runs the folder,
    although the folder's lock was free here.
    """
    left = {name: record for name, record in read_records(run_dir).items() if _may_run_elsewhere(record)}
    left = {name: record for name, record in left.items() if not _has_ended(run_dir, name, record)}
    if not left:
        return
    log.warning(
        "%s may still run on other machines, without a supervisor; they must end before anything starts", _names(left)
    )
    reached = end_there(stop)
    left = {name: record for name, record in left.items() if record.kernel not in reached}
    until = time.monotonic() + max((record.lease_s for record in left.values()), default=0.0) - _silence_s(run_dir)
    if time.monotonic() < until:
        log.warning(
            "%s cannot be reached; waiting up to %.0f s until they have ended by themselves; if you know that they "
            "have ended, stop this command, delete %s and start again",
            *(_names(left), until - time.monotonic(), run_dir / PROCESSES_FILE),
        )
    renewed = _renewed(run_dir)
    while time.monotonic() < until and not all(_has_ended(run_dir, name, record) for name, record in left.items()):
        if stop.wait(POLL_S):
            raise StoppedError("stopped while it waited for processes of an earlier start")
        try:
            newest = _renewed(run_dir)
        except FileNotFoundError:
            return  # The user has deleted the file, as the warning says, since the roles have ended.
        if newest > renewed:
            raise ConfigError(
                f"{run_dir} is being run by a process on another machine; stop that process first (locks on the disk "
                "of this folder do not reach other machines)"
            )


def _may_run_elsewhere(record: ProcessRecord) -> bool:
    if record.lease_s <= 0 or record.kernel == this_kernel():
        return False
    # There are two cases with the same host name. A process of an earlier boot of this machine has ended. A process in
    # another container of this machine, which may have the same host name, may still run.
    return record.host != socket.gethostname() or _is_near(record)


def _is_near(record: ProcessRecord) -> bool:
    """True if the process is in another container of this machine, whose processes this container does not see."""
    return record.kernel != this_kernel() and boot_of(record.kernel) == boot_of(this_kernel())


def _has_ended(run_dir: Path, name: str, record: ProcessRecord) -> bool:
    """True if the process was in another container of this machine, and no process holds the lock of its heartbeat."""
    if not _is_near(record):
        return False
    try:
        with (run_dir / ALIVE_FOLDER / name).open("r+") as beats:
            fcntl.flock(beats, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _renewed(run_dir: Path) -> float:
    return (run_dir / PROCESSES_FILE).stat().st_mtime


def _names(records: Mapping[str, ProcessRecord]) -> str:
    return ", ".join(f"{name} on {record.host or 'some host'}" for name, record in records.items())


def _silence_s(run_dir: Path) -> float:
    """Return the seconds since the last supervisor renewed `processes.json`, by the clock of the folder's disk."""
    now = run_dir / OWNER_FILE
    os.utime(now)
    return max(0.0, now.stat().st_mtime - _renewed(run_dir))
