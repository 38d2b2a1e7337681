"""One machine: start every role, restart what dies, end cleanly.

A role that ends with status 0 is done, with status 2 cannot be configured (the run ends with its last lines), otherwise
it is restarted, at most `max_restarts` times. Whatever happens to this process, its children are asked to stop.
`processes.json` in the run folder has the process id of each role.
"""

from __future__ import annotations

import json
import logging
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import AsyncrlError
from asyncrl.launch.child import kill_group, last_lines, start_child
from asyncrl.launch.roles import Role
from asyncrl.process import WORKER_VARIABLE

log = logging.getLogger(__name__)

STOP_S = 12.0
"""More than an actor takes to part with servers that do not answer; a clean stop takes a second or two."""
CANNOT_BE_CONFIGURED = 2


class RunFailedError(AsyncrlError):
    """A role ended for good before the run was done; the message has its last lines."""


@dataclass(slots=True)
class Child:
    role: Role
    process: subprocess.Popen[bytes]
    starts: int = 1
    done: bool = False


class Supervisor:
    """Keeps the roles of one run alive until the one named `until` is done. `environment` is added to each child's."""

    def __init__(
        self, roles: Sequence[Role], run_dir: Path, environment: Mapping[str, str], max_restarts: int, until: str
    ) -> None:
        self._logs = run_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._environment = environment
        self._max_restarts = max_restarts
        self._until = until
        self._processes = run_dir / "processes.json"
        self._children = {role.name: Child(role, self._start(role)) for role in roles}
        self._write_processes()

    @property
    def restarts(self) -> dict[str, int]:
        """How often each role was started again."""
        return {name: child.starts - 1 for name, child in self._children.items()}

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the roles that run."""
        return {name: child.process.pid for name, child in self._children.items() if child.process.poll() is None}

    def _start(self, role: Role) -> subprocess.Popen[bytes]:
        environment = {**self._environment, WORKER_VARIABLE: role.name}
        return start_child(role.command, self._logs / f"{role.name}.log", environment)

    def run(self, stopped: Callable[[], bool], progress: Callable[[], None], interval_s: float = 0.2) -> bool:
        """Supervise until the run is done (True) or `stopped()` (False); `progress` is called at every look.

        Raises RunFailedError: a role cannot go on. Every child has ended when this returns or raises.
        """
        try:
            while not stopped():
                for child in self._children.values():
                    self._look_after(child)
                if self._children[self._until].done:
                    return True
                progress()
                time.sleep(interval_s)
            return False
        finally:
            self.stop()

    def _look_after(self, child: Child) -> None:
        status = child.process.poll()
        if status is None or child.done:
            return
        if status == 0:
            child.done = True
            return
        last = self.last_lines(child.role.name)
        if status == CANNOT_BE_CONFIGURED:
            raise RunFailedError(f"{child.role.name} cannot run:\n{last}")
        if child.starts > self._max_restarts:
            raise RunFailedError(f"{child.role.name} ended {child.starts} times, at last with status {status}:\n{last}")
        log.warning("%s ended with status %d; starting it again", child.role.name, status)
        child.process = self._start(child.role)
        child.starts += 1
        self._write_processes()

    def _write_processes(self) -> None:
        aside = self._processes.with_suffix(".partial")
        aside.write_text(json.dumps(self.pids))
        aside.replace(self._processes)

    def last_lines(self, name: str, count: int = 15) -> str:
        """The end of a role's log."""
        return last_lines(self._logs / f"{name}.log", count)

    def stop(self) -> None:
        """Ask every child to stop; those that have not after STOP_S are killed with their own children."""
        for child in self._running():
            child.process.terminate()
        deadline = time.monotonic() + STOP_S
        while any(self._running()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for child in self._running():
            log.warning("%s did not stop in time; killing it", child.role.name)
            kill_group(child.process)

    def _running(self) -> Iterator[Child]:
        return (child for child in self._children.values() if child.process.poll() is None)
