"""The supervisor's view of a role: its command, and its process on this host or another one."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from asyncrl.machine.activity import FINISH_S
from asyncrl.machine.child import kill_group_soon, start_child
from asyncrl.machine.identity import ProcessIdentity
from asyncrl.machine.process import DRAIN


@dataclass(frozen=True, slots=True)
class RoleCommand:
    """The command that starts a role.

    - `name`: the name of the role, which stays the same over restarts;
    - `command`, `environment`: the command line, and the variables to add to the environment;
    - `drains`: the role can finish its work before it ends;
    - `ends_last`: a stop ends the role after all other roles, which need it until they end.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    drains: bool = False
    ends_last: bool = False


class RoleProcess(Protocol):
    """The process of a role.

    - `pid`: its process id; 0 while the role waits for free resources;
    - `host`: the name of its host; empty while the role waits;
    - `identity`: the process whose end is the end of the role; `None`: it is not known yet;
    - `lease_s`: the seconds after which the role has ended by itself if its supervisor is no longer running.
    """

    @property
    def pid(self) -> int: ...

    @property
    def host(self) -> str: ...

    @property
    def identity(self) -> ProcessIdentity | None: ...

    @property
    def lease_s(self) -> float: ...

    def poll(self) -> int | None:
        """Return the exit status of the process, or the negative number of the signal that killed it. `None` while it
        runs.

        Once there is a status, the log is complete.
        """

    def terminate(self) -> None:
        """Ask the process to stop."""

    def drain(self) -> None:
        """Ask the process to end once its work is finished."""

    def kill(self) -> None:
        """Kill the process and its own children, without waiting: `poll` tells when it has ended."""


Start = Callable[[RoleCommand, Path, Mapping[str, str]], RoleProcess]
"""Starts a role, appends its output to a log (the path), and adds variables to its environment (the mapping)."""


class NotStarted:
    """A role that could not be started. It counts as a role that failed at once."""

    pid, identity, lease_s = 0, None, 0.0

    def __init__(self) -> None:
        self.host = socket.gethostname()

    def poll(self) -> int:
        return 1

    def terminate(self) -> None:
        pass

    drain = kill = terminate


class LocalProcess:
    """A role that is a child of this process. If this process ends, the role ends by itself: see `machine.activity`."""

    lease_s = FINISH_S

    def __init__(self, role: RoleCommand, log_file: Path, environment: Mapping[str, str]) -> None:
        self._process = start_child(role.command, log_file, environment)
        self.pid, self.host = self._process.pid, socket.gethostname()
        self.identity = ProcessIdentity.of(self.pid)

    def poll(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def drain(self) -> None:
        self._process.send_signal(DRAIN)

    def kill(self) -> None:
        kill_group_soon(self._process)
