"""One machine: start every role, restart those that end, stop all cleanly.

The run is done when the role named `until` ends with status 0. Status 2 says that a role cannot be configured, status 3
that too much fails in the run: the run ends with the last lines of the role's log. Any other end is a failure: also
status 0 of another role, and the end of a role to which somebody else sent a signal. A role that failed is started
again, after a pause that doubles with each failure up to a bound. A role that fails more than `max_restarts` times ends
the run; failures are forgotten once the role has run for `WELL_S`. If this process ends in any way, its children are
asked to stop. `processes.json` in the run folder has the process id of each role.
"""

from __future__ import annotations

import json
import logging
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.load import EXIT_HOPELESS, EXIT_USAGE
from asyncrl.errors import AsyncrlError
from asyncrl.machine.child import kill_group, last_lines, start_child
from asyncrl.machine.files import write_whole
from asyncrl.machine.process import STOP_S, WORKER_VARIABLE

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25
MOST_DOUBLINGS = 64
"""The pause is at its bound long before, and 2 to the power of a thousand failures would overflow a float."""
SHOWN_LINES = 3
"""How much of an ended role's log is shown: enough for the reason and what to do about it."""
WELL_S = 300.0
"""After so long a new failure has nothing to do with the earlier ones."""


class RunFailedError(AsyncrlError):
    """A role ended for good before the run was done; the message has its last lines."""


@dataclass(frozen=True, slots=True)
class RoleCommand:
    """One role's process: its name, which stays over restarts, and its command line."""

    name: str
    command: Sequence[str]


@dataclass(slots=True)
class _Process:
    """A role's process now. Its log had `log_start` bytes when it was started. `failures` are those since it last ran
    well; `due` is when it is started again."""

    role: RoleCommand
    process: subprocess.Popen[bytes]
    log_start: int
    started: float
    starts: int = 1
    failures: int = 0
    due: float | None = None
    done: bool = False


def pause_s(failures: int, longest_s: float) -> float:
    """The pause before a role starts again that has failed so many times in a row: twice as long each time, up to a
    bound."""
    return min(longest_s, FIRST_PAUSE_S * 2.0 ** min(failures - 1, MOST_DOUBLINGS))


class Supervisor:
    """Keeps the roles of one run alive until the one named `until` is done.

    `environment` is added to that of every role. No pause before a start is longer than `longest_pause_s`. A role that
    has not ended `stop_s` after it was asked to is killed. `clock` gives seconds.
    """

    def __init__(
        self,
        roles: Sequence[RoleCommand],
        run_dir: Path,
        environment: Mapping[str, str],
        max_restarts: int,
        until: str,
        longest_pause_s: float = 60.0,
        stop_s: float = STOP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs = run_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._environment = environment
        self._max_restarts = max_restarts
        self._until = until
        self._longest_pause_s = longest_pause_s
        self._stop_s = stop_s
        self._clock = clock
        self._processes = run_dir / "processes.json"
        self._unwritten = False
        self._children = {role.name: _Process(role, *self._start(role), clock()) for role in roles}
        self._write_processes()

    @property
    def restarts(self) -> dict[str, int]:
        """How often each role was restarted."""
        return {name: child.starts - 1 for name, child in self._children.items()}

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the roles that run."""
        return {name: child.process.pid for name, child in self._children.items() if child.process.poll() is None}

    def _start(self, role: RoleCommand) -> tuple[subprocess.Popen[bytes], int]:
        """The process, and the bytes that its log had before."""
        log_file, environment = self._log_of(role), {**self._environment, WORKER_VARIABLE: role.name}
        before = log_file.stat().st_size if log_file.exists() else 0
        return start_child(role.command, log_file, environment), before

    def _log_of(self, role: RoleCommand) -> Path:
        return self._logs / f"{role.name}.log"

    def run(self, stopped: Callable[[], bool], progress: Callable[[], None], interval_s: float = 0.2) -> bool:
        """Supervise until the run is done (True) or `stopped()` (False); `progress` is called at every poll.

        Raises RunFailedError: a role cannot go on. Every child has ended when this returns or raises.
        """
        try:
            while not stopped():
                for child in self._children.values():
                    self._check(child)
                if self._unwritten:
                    self._write_processes()
                if self._children[self._until].done:
                    return True
                progress()
                time.sleep(interval_s)
            return False
        finally:
            self.stop()

    def _check(self, child: _Process) -> None:
        status, now = child.process.poll(), self._clock()
        if status is None or child.done:
            return
        if status == 0 and child.role.name == self._until:
            child.done = True
        elif child.due is None:
            self._fail(child, status, now)
        elif child.due <= now:
            child.process, child.log_start = self._start(child.role)
            child.started, child.due = now, None
            child.starts += 1
            self._write_processes()

    def _fail(self, child: _Process, status: int, now: float) -> None:
        """Plan the next start of a role that ended. Raises RunFailedError: it cannot go on."""
        name = child.role.name
        log_file = self._log_of(child.role)
        last = last_lines(log_file, start=child.log_start)
        if status == EXIT_USAGE:
            raise RunFailedError(f"{name} cannot run:\n{last}")
        if status == EXIT_HOPELESS:
            raise RunFailedError(f"{name} has ended the run, since too much fails:\n{last}")
        child.failures = 1 if now - child.started >= WELL_S else child.failures + 1
        if child.failures > self._max_restarts:
            raise RunFailedError(f"{name} ended {child.failures} times, at last with status {status}:\n{last}")
        pause = pause_s(child.failures, self._longest_pause_s)
        child.due = now + pause
        shown = last_lines(log_file, SHOWN_LINES, child.log_start)
        log.warning(
            "%s ended with status %d; starting it again in %.2g s; its log ends:\n%s", name, status, pause, shown
        )
        self._write_processes()

    def _write_processes(self) -> None:
        """Write the process ids; on a full disk they are written later."""
        try:
            write_whole(self._processes, json.dumps(self.pids))
        except OSError as error:
            if not self._unwritten:
                log.warning("%s cannot be written now; this is tried again: %s", self._processes, error)
            self._unwritten = True
        else:
            self._unwritten = False

    def stop(self) -> None:
        """Ask every role to stop. Those that have not ended after `stop_s` are killed with their own children."""
        for child in self._running():
            child.process.terminate()
        deadline = time.monotonic() + self._stop_s
        while any(self._running()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for child in self._running():
            log.warning("%s did not stop in time; killing it", child.role.name)
            kill_group(child.process)

    def _running(self) -> Iterator[_Process]:
        return (child for child in self._children.values() if child.process.poll() is None)
