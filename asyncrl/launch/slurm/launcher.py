"""`cluster.launcher=slurm`: starts the roles of a run as steps of one job of Slurm, each by a separate srun.

The supervisor is the job's batch script (`job.py`). It restarts an ended role on the same node. If a node fails,
Slurm requeues the job, which resumes the run. Each start of the job has a folder of logs, `logs/attempt-N`: the link
`logs/latest` leads to the newest folder, and `logs/ROLE.log` to the newest log of a role.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from asyncrl.config.exits import EXIT_STOPPED
from asyncrl.config.schema import ClusterConfig
from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.placement.placement import PlacedRole, Placement, check_unmoved
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.role_process import RoleCommand, RoleProcess
from asyncrl.launch.slurm.commands import SlurmJob, SlurmNode, step_command
from asyncrl.launch.slurm.step import ALL_GPUS, NodeReport
from asyncrl.launch.supervisor import Supervisor
from asyncrl.machine.child import kill_group_soon, start_child
from asyncrl.machine.identity import ProcessIdentity
from asyncrl.machine.numa import GPU_VARIABLE
from asyncrl.machine.process import DRAIN, STOP_OF_STEP
from asyncrl.machine.shared_folder import canary
from asyncrl.version import VERSION

log = logging.getLogger(__name__)

STEP = "asyncrl.launch.slurm.step"
LATEST = "latest"
LOOK_S = 300.0
"""Every node of the job must report within this many seconds: Python may start slowly from a network disk."""
KILL_S = 10.0
"""The longest wait for srun to end after it was asked to kill its step. A process that hangs in the kernel may never
end."""


class SlurmLauncher:
    """The `launcher.Launcher` that starts the roles of a run on the nodes of `job`.

    `hosts` asks each node for a report, unless `reports` were given. It raises ConfigError if a node does not share the
    run's folder, or lacks the configured network interface. `prepare` sets the addresses and free ports of replay and
    learner, and makes keys.
    """

    def __init__(
        self, cluster: ClusterConfig, addresses: RunAddresses, job: SlurmJob, reports: Sequence[NodeReport] = ()
    ) -> None:
        self._cluster, self._addresses, self._job = cluster, addresses, job
        self._run_dir = addresses.run_dir
        self.python = cluster.slurm.python or sys.executable
        """The Python of the roles."""
        self._placement: Placement | None = None
        self._roles: dict[str, PlacedRole] = {}
        self._reports = list(reports)
        self._attempt: Path | None = None

    def reports(self) -> list[NodeReport]:
        """Return the report of each node, in the job's order."""
        if not self._reports:
            self._reports = self._look()
        return self._reports

    def hosts(self) -> list[Host]:
        cluster = self._cluster
        return [
            Host(
                each.gpus if cluster.gpus is None else min(each.gpus, cluster.gpus),
                each.cpus if cluster.cpus is None else min(each.cpus, cluster.cpus),
            )
            for each in self.reports()
        ]

    def _look(self) -> list[NodeReport]:
        """Return the reports of all nodes, in their order. Raises ConfigError, with a line for each node that cannot be
        used."""
        with canary(self._run_dir) as file:
            found = {report.name: report for command in self.look_commands(file) for report in _reports(command)}
        if problems := list(self._problems(found)):
            raise ConfigError("\n".join(problems))
        return [found[node.name] for node in self._job.nodes]

    def look_commands(self, file: Path) -> list[list[str]]:
        """Return the command lines of the steps, one for each component of the job, in which every node looks for
        `file` and reports. A node that sees the file shares the run's folder."""
        slurm, ports = self._cluster.slurm, self._addresses.shards + 2
        words = ["look", f"--canary={file}", f"--ports={ports}"]
        words += [f"--interface={slurm.interface}"] if slurm.interface else []
        # The first node finds its own address by its route to the second node.
        words += [f"--towards={node.address}" for node in self._job.nodes[:2]]
        parts = [[node for node in self._job.nodes if node.group == group] for group in self._job.groups]
        return [self._step("look", nodes, [self.python, "-m", STEP, *words]) for nodes in parts]

    def _problems(self, found: Mapping[str, NodeReport]) -> Iterator[str]:
        for node in self._job.nodes:
            report = found.get(node.name)
            if report is None:
                yield f"node {node.name} of the job has not reported: its output is above"
            elif not report.sees:
                yield (
                    f"run.dir={self._addresses.run.dir}: node {node.name} does not see a file that was just written "
                    f"into {self._run_dir}; name a folder on a disk that all nodes share"
                )
            elif report.version != VERSION:
                yield (
                    f"node {node.name} has asyncrl {report.version}, and the batch script {VERSION}: "
                    "install the same version"
                )
            elif report.problem:
                yield f"cluster.slurm.interface: node {node.name}: {report.problem}"

    def _step(self, name: str, nodes: Sequence[SlurmNode], command: Sequence[str]) -> list[str]:
        slurm = self._cluster.slurm
        return step_command(name, nodes, slurm.srun, slurm.container, command)

    def step(self, name: str, node: int, command: Sequence[str]) -> list[str]:
        """Return the srun command line that runs `command` on the node with the number `node` in the job."""
        return self._step(name, [self._job.nodes[node]], command)

    def is_one_machine(self) -> bool:
        return len(self._job.nodes) == 1

    def check_addresses(self, placement: Placement) -> None:
        pass  # The nodes of a job have addresses.

    def prepare(self, placement: Placement, stop: threading.Event) -> None:
        network, learner = self._addresses.network, self._addresses.learner
        shards = self._addresses.shards
        self.set_placement(placement)
        for number, report in enumerate(self._reports):
            log.info("host %d is node %s of job %s, at %s", number, report.name, self._job.id, report.address)
        if len(self._job.nodes) > 1:
            network.replay_host = network.replay_host or self._report_of(placement, "replay").address
            network.learner_host = network.learner_host or self._report_of(placement, "learner").address
        network.replay_port = network.replay_port or self._report_of(placement, "replay").port
        network.weights_port = network.weights_port or self._report_of(placement, "learner").port + shards
        if learner.nodes > 1 and learner.rendezvous is None:
            report = self._report_of(placement, "learner")
            learner.rendezvous = f"{network.learner_host}:{report.port + shards + 1}"
            learner.interface = learner.interface or self._cluster.slurm.interface
        # Other users may share a node, so even its loopback addresses need keys.
        self._addresses.take_keys()

    def _report_of(self, placement: Placement, module: str) -> NodeReport:
        return self._reports[placement.of(module)[0].node]

    def set_placement(self, placement: Placement) -> None:
        if self._placement is not None:
            check_unmoved(self._placement, placement)
        self._placement = placement
        self._roles = {role.name: role for role in placement.roles}

    def role_command(self, role: RoleCommand) -> list[str]:
        """Return the srun command line of a role."""
        placed, python = self._roles[role.name], self.python
        gpus = ALL_GPUS if placed.gpus is None else ",".join(map(str, placed.gpus))
        command = [python, "-m", STEP, "role", gpus, python, *role.command[1:]]
        return self.step(role.name, placed.node, command)

    def start(self, role: RoleCommand, log_file: Path, environment: Mapping[str, str]) -> RoleProcess:
        """Start a role: see `role_process.Start`."""
        self._lead_to_attempt(log_file)
        # The step itself chooses among the GPUs that it sees. If Slurm does not manage GPUs, it sees all GPUs of the
        # node.
        others = {name: value for name, value in environment.items() if name != GPU_VARIABLE}
        return _Step(self.role_command(role), self._job.nodes[self._roles[role.name].node].name, log_file, others)

    def _lead_to_attempt(self, log_file: Path) -> None:
        """Make a role's log a link into the folder of this start of the job."""
        logs = log_file.parent
        if self._attempt is None:
            self._attempt = new_attempt(logs)
        link = Path(LATEST, log_file.name)
        if not log_file.is_symlink():
            if log_file.exists():
                log_file.rename(log_file.with_suffix(".before-slurm.log"))
            log_file.symlink_to(link)

    def end_left(self, stop: threading.Event) -> Collection[str]:
        return ()

    def watch(self, supervisor: Supervisor) -> None:
        pass

    def close(self) -> None:
        pass


def new_attempt(logs: Path) -> Path:
    """Make the next folder `attempt-N` and have `latest` lead to it."""
    numbers = [int(found[1]) for each in logs.iterdir() if (found := re.fullmatch(r"attempt-(\d+)", each.name))]
    folder = logs / f"attempt-{max(numbers, default=0) + 1}"
    folder.mkdir()
    link = logs / f".{LATEST}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.rename(logs / LATEST)
    return folder


def _reports(command: Sequence[str]) -> Iterator[NodeReport]:
    """Yield the answers of the nodes. Other output, such as messages of srun, goes to the log."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"the nodes of the job do not report their GPUs and CPUs: {error}") from error
    for line in f"{done.stdout}{done.stderr}".splitlines():
        try:
            yield NodeReport(**json.loads(line))
        except (ValueError, TypeError):
            log.warning("%s", line)


class _Step:
    """A role in a step. SIGTERM would make srun kill the step, so a role is asked to stop by another signal, which srun
    passes on to all processes of the step. The step ends with its srun."""

    lease_s = 0.0

    def __init__(self, command: Sequence[str], node: str, log_file: Path, environment: Mapping[str, str]) -> None:
        # The role may be on another node. There it chooses the CPUs near its GPUs itself.
        self._srun = start_child(command, log_file, environment, near_gpus=False)
        self.pid, self.host = self._srun.pid, node
        self.identity = ProcessIdentity.of(self.pid)
        self._killed: float | None = None

    def poll(self) -> int | None:
        status = self._srun.poll()
        if status is None and self._killed is not None and time.monotonic() - self._killed >= KILL_S:
            kill_group_soon(self._srun)
        # Like a shell, srun returns 128 plus the number of a signal.
        return 128 - status if status is not None and status > 128 and status != EXIT_STOPPED else status

    def terminate(self) -> None:
        self._srun.send_signal(STOP_OF_STEP)

    def drain(self) -> None:
        self._srun.send_signal(DRAIN)

    def kill(self) -> None:
        self._srun.terminate()
        self._killed = self._killed or time.monotonic()
