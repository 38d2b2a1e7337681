"""Starts every role, restarts failed roles, and stops all of them cleanly. By default a role is a child of this
process. The function `start` of a launcher can start the role on another host.

The run is done when the role named `until` ends with status 0. Roles whose names begin with that name, such as the
learner on other hosts, may end with status 0, too. Status 2 means that the role cannot be configured, and status 3 that
too much of its work fails. Both end the run with the last lines of the role's log.

Any other end is a failure, such as status 0 of an actor, or a signal from another program. A failed role
restarts, after a pause that doubles with each failure up to a bound. A role whose heartbeats stop is killed, which is a
failure. A role that the system cannot start now, for example for lack of memory, has failed, too.

A role that fails more than `max_restarts` times ends the run. The count of failures starts again once the role has run
for `WELL_S` seconds. If this process ends in any way, its children are asked to stop. In the run folder, `alive/` has
the heartbeats of the roles, and `processes.json` has their hosts and process ids.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.exits import EXIT_HOPELESS, EXIT_USAGE
from asyncrl.config.load import MESSAGE
from asyncrl.config.locations import ALIVE_FOLDER
from asyncrl.errors import AsyncrlError
from asyncrl.launch.ownership import StopRequests
from asyncrl.launch.process_records import ProcessRecords, record_of
from asyncrl.launch.role_process import LocalProcess, NotStarted, RoleCommand, RoleProcess, Start
from asyncrl.machine.activity import FINISH_S, Pulse
from asyncrl.machine.activity import VARIABLE as HEARTBEAT_VARIABLE
from asyncrl.machine.child import last_lines
from asyncrl.machine.process import STOP_S, WORKER_VARIABLE

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25
MOST_DOUBLINGS = 64
"""The largest exponent in the computation of the pause between restarts. It is needed because `2.0 ** 1024` overflows.
The pause itself reaches its maximum much earlier."""
SHOWN_LINES = 3
"""The number of last lines of an ended role's log that are shown: enough for the reason and its fix."""
WELL_S = 300.0
"""A failure counts as the first one of its role if the role ran for this many seconds before it."""
SOON_S = 2.0
"""A stop that takes longer than this logs what it waits for."""
KILLED_S = 12.0
"""The longest wait for killed processes at the end of a run. A process that hangs in the kernel, or on a host that
cannot be reached, may never end."""


class RunFailedError(AsyncrlError):
    """A role ended before the run was done, and is not started again. The message has the last lines of the role's
    log."""


@dataclass(slots=True)
class _Child:
    """The current process of a role.

    - `log_start`: the bytes that the role's log had when the process started;
    - `failures`: the number of failures since the role last ran for `WELL_S` seconds;
    - `due`: the time of the next start after a failure;
    - `asked`: the time at which the process was asked to end, so that its end is not a failure;
    - `killed`: the process was killed, but may end much later on a host that cannot be reached;
    - `hung`: the process was killed because it hung.
    """

    role: RoleCommand
    process: RoleProcess
    log_start: int
    pulse: Pulse
    started: float
    starts: int = 1
    failures: int = 0
    due: float | None = None
    done: bool = False
    asked: float | None = None
    killed: bool = False
    hung: bool = False


def pause_s(failures: int, longest_s: float) -> float:
    """Return the pause before a role restarts after `failures` failures in a row: it doubles each time, up to a
    bound."""
    return min(longest_s, FIRST_PAUSE_S * 2.0 ** min(failures - 1, MOST_DOUBLINGS))


def _message(last: str) -> str:
    """Return the role's error messages in the `last` lines of its log, or all these lines if there is no message."""
    messages = [line.removeprefix(MESSAGE) for line in last.splitlines() if line.startswith(MESSAGE)]
    return "\n".join(dict.fromkeys(messages)) or last


class Supervisor:
    """Keeps the roles of one run alive until the role named `until` is done.

    - `longest_pause_s`: the longest pause before a restart;
    - `stop_s`: the seconds after which a role that was asked to end is killed;
    - `clock`: gives seconds;
    - `hang_s`: a role that has sent no heartbeat for this many seconds counts as hung;
    - `finish_s`: takes the place of `stop_s` while the role's heartbeat names unfinished work;
    - `drain_s`: the additional time for a role that drains, if it is removed or the run is stopped early;
    - `killed_s`: the longest time for which a stop waits for the end of roles that it killed.
    """

    def __init__(
        self,
        roles: Sequence[RoleCommand],
        run_dir: Path,
        max_restarts: int,
        until: str,
        longest_pause_s: float = 60.0,
        stop_s: float = STOP_S,
        clock: Callable[[], float] = time.monotonic,
        start: Start = LocalProcess,
        hang_s: float = math.inf,
        finish_s: float = FINISH_S,
        drain_s: float = 0.0,
        killed_s: float = KILLED_S,
    ) -> None:
        self._start_role = start
        self._run_dir = run_dir
        self._requests = StopRequests(run_dir, clock)
        self._logs = run_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._max_restarts = max_restarts
        self._until = until
        self._longest_pause_s = longest_pause_s
        self._stop_s = stop_s
        self._clock = clock
        self._hang_s = hang_s
        self._finish_s = finish_s
        self._drain_s = drain_s
        self._killed_s = killed_s
        self._records = ProcessRecords(run_dir, clock)
        self._roles = list(roles)
        self._children = {role.name: self._started(role) for role in roles}
        self._leaving: list[_Child] = []
        self._record()

    @property
    def restarts(self) -> dict[str, int]:
        """The number of restarts of each role."""
        return {name: child.starts - 1 for name, child in self._children.items()}

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the roles that run."""
        return {name: child.process.pid for name, child in self._children.items() if child.process.poll() is None}

    def set_roles(self, roles: Sequence[RoleCommand]) -> None:
        """Start new roles, and stop running roles that are not in `roles`. Removed roles drain even if `drain_s` is 0:
        no restart will continue their work."""
        for name in self._children.keys() - {role.name for role in roles}:
            child = self._children.pop(name)
            self._ask_to_end(child, child.role.drains)
            self._leaving.append(child)
        self._roles = list(roles)

    def restart(self, names: Collection[str]) -> None:
        """Ask roles to stop, and start them again. This does not count as a failure."""
        for name in names:
            if self._children[name].process.poll() is None:
                self._ask_to_end(self._children[name], self._drains(self._children[name]))

    def _ask_to_end(self, child: _Child, drains: bool) -> None:
        if drains:
            child.process.drain()
        else:
            child.process.terminate()
        child.asked = self._clock()

    def _drains(self, child: _Child) -> bool:
        return child.role.drains and self._drain_s > 0

    def _started(self, role: RoleCommand) -> _Child:
        return _Child(role, *self._start(role), self._clock())

    def _start(self, role: RoleCommand) -> tuple[RoleProcess, int, Pulse]:
        """Start a role. Return its process, the bytes that its log had before, and its heartbeat."""
        log_file, beats = self._log_of(role), (self._run_dir / ALIVE_FOLDER / role.name).absolute()
        before, pulse = log_file.stat().st_size if log_file.exists() else 0, Pulse(beats, self._clock)
        environment = {**role.environment, WORKER_VARIABLE: role.name, HEARTBEAT_VARIABLE: str(beats)}
        try:
            process = self._start_role(role, log_file, environment)
        except (FileNotFoundError, PermissionError):
            raise  # A retry would fail, too.
        except OSError as error:
            log.warning("%s cannot be started: %s", role.name, error)
            process = NotStarted()
        return process, before, pulse

    def _log_of(self, role: RoleCommand) -> Path:
        return self._logs / f"{role.name}.log"

    def run(self, stopped: Callable[[], bool], progress: Callable[[], None], interval_s: float = 0.2) -> bool:
        """Supervise until the run is done (True), or until `stopped()` or a stop request in the run folder ends it
        (False). `progress` is called at every poll.

        Raises RunFailedError: a role cannot continue. When this returns or raises, every child has ended, except a
        killed one that has not ended within `killed_s`.
        """
        try:
            while not (stopped() or self._requests.arrived()):
                for child in self._children.values():
                    self._check(child)
                self._admit()
                self._record()
                if self._children[self._until].done:
                    return True
                progress()
                time.sleep(interval_s)
            self._drain(interval_s)
            return self._children[self._until].process.poll() == 0
        finally:
            self.stop()

    def _admit(self) -> None:
        """Start the roles that have no process yet, once an earlier process of the same name has ended."""
        for child in self._leaving:
            self._end_in_time(child)
        self._leaving = [child for child in self._leaving if child.process.poll() is None]
        absent = {role.name for role in self._roles} - self._children.keys()
        for role in self._roles:
            if role.name in absent - {child.role.name for child in self._leaving}:
                self._children[role.name] = self._started(role)

    def _end_in_time(self, child: _Child) -> None:
        if child.asked is None or child.killed or child.process.poll() is not None:
            return
        if self._is_late(child, child.asked + (self._drain_s if self._drains(child) else 0.0)):
            log.warning("%s did not stop in time; killing it", child.role.name)
            child.killed = True
            child.process.kill()

    def _is_late(self, child: _Child, asked: float) -> bool:
        """True if the process, which was asked to end at the time `asked`, should have ended by now."""
        seconds = self._clock() - asked
        return seconds >= self._stop_s and (seconds >= self._finish_s or not child.pulse.unfinished)

    def _check(self, child: _Child) -> None:
        self._end_in_time(child)
        runs = child.process.poll() is None and child.process.pid and not child.killed
        if runs and child.pulse.is_lost(self._hang_s):
            log.warning(
                "%s hangs: it gave no sign of life for %g s (cluster.hang_timeout_s); killing it",
                *(child.role.name, self._hang_s),
            )
            child.hung = child.killed = True
            child.process.kill()
        status, now = child.process.poll(), self._clock()
        if status is None or child.done:
            return
        if status == 0 and child.role.name.startswith(self._until):
            child.done = True
        elif child.due is None and child.asked is None:
            self._fail(child, status, now)
        elif child.due is None or child.due <= now:
            child.process, child.log_start, child.pulse = self._start(child.role)
            child.started, child.due, child.asked, child.hung, child.killed = now, None, None, False, False
            child.starts += 1

    def _fail(self, child: _Child, status: int, now: float) -> None:
        """Plan the next start of a role that ended. Raises RunFailedError: the role cannot continue."""
        name = child.role.name
        log_file = self._log_of(child.role)
        last = last_lines(log_file, start=child.log_start)
        if status == EXIT_USAGE:
            raise RunFailedError(f"{name} cannot run:\n{_message(last)}")
        if status == EXIT_HOPELESS:
            raise RunFailedError(f"{name} has ended the run:\n{_message(last)}")
        child.failures = 1 if now - child.started >= WELL_S else child.failures + 1
        if child.failures > self._max_restarts:
            how = "killed because it hung" if child.hung else f"with status {status}"
            raise RunFailedError(f"{name} ended {child.failures} times, at last {how}:\n{last}")
        killed = status == -signal.SIGKILL and not child.hung
        ended = (
            "was killed by SIGKILL (you, or the kernel for want of memory)" if killed else f"ended with status {status}"
        )
        pause = pause_s(child.failures, self._longest_pause_s)
        child.due = now + pause
        shown = last_lines(log_file, SHOWN_LINES, child.log_start)
        log.warning(
            "%s %s; starting it again in %.2g s; its log ends:\n%s",
            *(name, ended, pause, shown),
        )

    def _record(self) -> None:
        children = (*self._leaving, *self._children.values())
        self._records.write({each.role.name: record_of(each.process, each.starts - 1) for each in children})

    def _drain(self, interval_s: float) -> None:
        """Let the roles that drain finish their work, while all other roles keep running."""
        draining = [child for child in self._running() if self._drains(child)]
        until = self._clock() + self._drain_s + self._stop_s
        if draining:
            log.info("waiting up to %g s for running episodes and scores (cluster.drain_s)", self._drain_s)
        for child in draining:
            self._ask_to_end(child, drains=True)
        while self._clock() < until and any(child.process.poll() is None for child in draining):
            self._record()
            time.sleep(interval_s)

    def stop(self) -> None:
        """Stop every role. A role that does not end in time is killed with its own children.

        Roles stop at the same time, so that servers of actors end while the learner saves its last checkpoint. Roles
        with `ends_last` stop afterwards.
        """
        running = list(self._running())
        self._end([child for child in running if not child.role.ends_last])
        self._end([child for child in running if child.role.ends_last])
        self._record()

    def _end(self, children: Sequence[_Child]) -> None:
        for child in children:
            child.process.terminate()
        asked, shown, late = self._clock(), set[str](), list[_Child]()
        while waited := [child for child in children if child.process.poll() is None and child not in late]:
            for child in waited:
                if self._is_late(child, asked):
                    log.warning("%s did not stop in time; killing it", child.role.name)
                    child.process.kill()
                    late.append(child)
                elif self._clock() - asked > SOON_S and (what := child.pulse.unfinished) and what not in shown:
                    log.info("%s finishes %s; the stop waits up to %g s for it", child.role.name, what, self._finish_s)
                    shown.add(what)
            self._record()
            time.sleep(0.02)
        until = self._clock() + self._killed_s
        while self._clock() < until and any(child.process.poll() is None for child in late):
            time.sleep(0.02)

    def _running(self) -> Iterator[_Child]:
        every = (*self._children.values(), *self._leaving)
        return (child for child in every if child.process.poll() is None)
