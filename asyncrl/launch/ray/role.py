"""The Ray actors of a run. Each role has one, and so has each part of a node that a pool reserves.

`launcher.py` makes actors of these classes. Each actor has its own process, so it may change the working directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl.launch.survivors import end_here, starting_alone
from asyncrl.machine.activity import VARIABLE as HEARTBEAT_VARIABLE
from asyncrl.machine.child import kill_group, start_child
from asyncrl.machine.identity import ProcessIdentity, this_kernel
from asyncrl.machine.ports import free_ports
from asyncrl.machine.process import DRAIN
from asyncrl.machine.shared_folder import sees


@dataclass(frozen=True, slots=True)
class RoleReport:
    """A role's process on its node. `status` is the exit status, None while the process runs. `identity` is None after
    the process has ended."""

    pid: int
    status: int | None
    identity: ProcessIdentity | None


class OnNode:
    """An actor that answers questions about its node. Paths are relative to `folder`, where the run was started."""

    def __init__(self, folder: str) -> None:
        # If the node does not have the folder, the actor stays in the working directory that Ray has chosen. Ray
        # copies the folder's files there if the runtime environment names the folder as its `working_dir`.
        with suppress(FileNotFoundError):
            os.chdir(folder)

    def address(self) -> str:
        """Return the address of this node."""
        import ray

        return str(ray.util.get_node_ip_address())

    def free_ports(self, count: int) -> int:
        """Find free ports on this node: see `machine.ports.free_ports`."""
        return free_ports(count)

    def sees(self, file: str) -> bool:
        """True if this node sees the file."""
        return sees(Path(file))

    def end_left(self, run_dir: str) -> str:
        """End the roles on this node that an earlier launcher of the run has left. Return the node's kernel id
        (`ProcessIdentity.kernel`)."""
        end_here(Path(run_dir))
        return this_kernel()

    def gpus(self, numbers: Sequence[int]) -> list[str]:
        """Return the names of this Ray actor's GPUs with these `numbers`, counted from 0."""
        import ray

        names = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return [str(names[number]) for number in numbers]


class HostedRole(OnNode):
    """Runs the command line of one role as a child, which ends with this process in any case."""

    _process: subprocess.Popen[bytes] | None = None

    def start(
        self, command: Sequence[str], log_file: str, environment: Mapping[str, str], gpus: Sequence[str] | None
    ) -> RoleReport:
        """Start `command`, but with this node's Python as its first word, and the heartbeat that `environment` names.
        The role sees the GPUs with the names `gpus`; `None`: all GPUs.

        If an earlier Ray actor of the role was killed on this node, the role's earlier process may save for minutes.
        This method first waits until that process has ended. Raises UnavailableError: the process does not end."""
        visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        with starting_alone(Path(environment[HEARTBEAT_VARIABLE])):
            self._process = start_child([sys.executable, *command[1:]], Path(log_file), {**environment, **visible})
        return self.poll()

    def poll(self) -> RoleReport:
        """Return the state of the role. Raises AssertionError: it was not started."""
        assert self._process is not None
        return RoleReport(self._process.pid, self._process.poll(), ProcessIdentity.of(self._process.pid))

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def drain(self) -> None:
        if self._process is not None:
            self._process.send_signal(DRAIN)

    def kill(self) -> None:
        """Kill the role and its own children."""
        if self._process is not None:
            kill_group(self._process)
