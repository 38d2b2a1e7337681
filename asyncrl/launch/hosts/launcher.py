"""`cluster.launcher=hosts`: runs the roles on hosts that are reached by a remote shell, such as ssh.

All hosts share the run's folder and the folder in which the run was started. On the host of a role, `remote_role`
starts the role and keeps the connection to the launcher. If the connection breaks, the role ends within `LEASE_S`. The
supervisor restarts it after this time.

If the connection breaks before the launcher knows the process id, the supervisor restarts the role at once, and
`remote_role` makes sure that only one process of the role runs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from asyncrl.config.bind import is_loopback
from asyncrl.config.locations import ALIVE_FOLDER
from asyncrl.config.schema import ClusterConfig
from asyncrl.config.secrets import shown_words
from asyncrl.errors import ConfigError
from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.hosts.remote_role import (
    ALIVE,
    COUNT,
    DRAIN,
    ENDED,
    KILL,
    READ_BYTES,
    SIGNALLED,
    STARTED,
    STOP,
)
from asyncrl.launch.placement.placement import PlacedRole, Placement, check_unmoved
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.processes import role_environment
from asyncrl.launch.role_process import RoleCommand, RoleProcess
from asyncrl.launch.supervisor import Supervisor
from asyncrl.machine.child import ending_with_parent, opened_log
from asyncrl.machine.identity import ProcessIdentity
from asyncrl.machine.shared_folder import answer_to, canary
from asyncrl.version import VERSION

log = logging.getLogger("asyncrl.train")

LEASE_S = 120.0
"""The lease: a role ends if it does not hear from the launcher for this long. If the network was down for half a
minute, a TCP connection has recovered before this time is over."""
LATE_S = 10.0
"""After its connection is lost, a role counts as running for this much longer than its lease: a busy host may end it
late."""
ALIVE_S = 1.0
CHECK_S = 120.0
"""A host must answer the first check within this time. It may have to load torch from a cold disk."""
KILLED_S = 10.0
ENDED_POLL_S = 0.1
NO_CONNECTION = 255
"""The exit status of ssh if it cannot connect or loses the connection."""
RENDEZVOUS_PORT = 5757
HANDED_ON = ("PYTHONPATH", "PATH", "HF_HOME", "HF_HUB_OFFLINE", "OMP_WAIT_POLICY")
"""Variables of the launcher's environment that roles on other hosts get."""


class HostsLauncher:
    """The `launcher.Launcher` that starts the roles of a run on `cluster.hosts`."""

    def __init__(self, cluster: ClusterConfig, addresses: RunAddresses, lease_s: float = LEASE_S) -> None:
        self._cluster, self._addresses = cluster, addresses
        self._names, self._lease_s, self._run_dir = cluster.hosts, lease_s, addresses.run_dir
        self._placement: Placement | None = None
        self._roles: dict[str, PlacedRole] = {}
        self._id, self._starts = uuid4().hex, 0

    def hosts(self) -> list[Host]:
        """Return the GPUs and CPUs of each host.

        Raises ConfigError, with a line for each host that cannot be reached, or does not share the run's folder.
        """
        log.info(
            "asking hosts %s for their GPUs and CPUs, and whether they see %s", ", ".join(self._names), self._run_dir
        )
        with canary(self._run_dir) as file, ThreadPoolExecutor(len(self._names)) as threads:
            answers = list(threads.map(lambda index: self._check(file, index), range(len(self._names))))
        if problems := [answer for answer in answers if isinstance(answer, str)]:
            raise ConfigError("\n".join(problems))
        return [answer for answer in answers if isinstance(answer, Host)]

    def _check(self, file: Path, index: int) -> Host | str:
        """Return the GPUs and CPUs of a host, or the line that says why it cannot be used."""
        name, cluster = self._names[index], self._cluster
        count = COUNT if cluster.gpus is None else "no"
        command = self._command(name, "check", str(file), str(index), count)
        where = f"cluster.hosts: {name}"
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CHECK_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{where} does not answer: {error}; check cluster.shell={shlex.join(shown_words(cluster.shell))}"
        told = _answer(done.stdout)
        if done.returncode or told is None:
            said = " ".join(done.stderr.strip().splitlines()[-2:])
            why = said or f"status {done.returncode}"
            return f"{where} cannot run asyncrl ({why}): {shlex.join(shown_words(command))}"
        if told["version"] != VERSION:
            return f"{where} has asyncrl {told['version']}, this host {VERSION}; install the same version"
        if not told["sees"] or not answer_to(file, index).exists():
            return (
                f"{where} does not share the folder {self._run_dir}; set run.dir to one that all hosts read and write"
            )
        return Host(told["gpus"] if cluster.gpus is None else cluster.gpus, cluster.cpus or told["cpus"])

    def _command(self, host: str, *arguments: str, environment: Mapping[str, str] | None = None) -> list[str]:
        """Return the command line that runs `remote_role` with `arguments` on `host`."""
        inherited = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
        variables = (f"{name}={value}" for name, value in {**inherited, **(environment or {})}.items())
        there = shlex.join(["env", *variables, sys.executable, "-m", "asyncrl.launch.hosts.remote_role", *arguments])
        shell = [word.replace("{host}", host) for word in self._cluster.shell]
        return [*shell, f"cd {shlex.quote(str(Path.cwd()))} && exec {there}"]

    def is_one_machine(self) -> bool:
        return len(self._names) == 1

    def check_addresses(self, placement: Placement) -> None:
        self._reachable(placement)

    def prepare(self, placement: Placement, stop: threading.Event) -> None:
        """Choose the addresses and ports that the configuration does not give, and make keys if they are needed. Raises
        ConfigError: a host has no address, or the keys cannot be used."""
        self.set_placement(placement)
        network, learner = self._addresses.network, self._addresses.learner
        network.replay_host, network.learner_host = self._reachable(placement)
        self._addresses.choose_ports()
        if learner.nodes > 1 and learner.rendezvous is None:
            learner.rendezvous = f"{network.learner_host}:{RENDEZVOUS_PORT}"
        self._addresses.close_to_others()

    def _reachable(self, placement: Placement) -> tuple[str, str]:
        """Return the addresses of replay and learner. Raises ConfigError: a host has no address."""
        network = self._addresses.network
        return (
            network.replay_host or self._address(placement, "replay"),
            network.learner_host or self._address(placement, "learner"),
        )

    def _address(self, placement: Placement, module: str) -> str:
        """Return the address of the host on which a role runs. Raises ConfigError: the host's name resolves to no
        address that other hosts can reach."""
        name = self._names[placement.of(module)[0].node].rpartition("@")[2]
        fix = f"set network.{module}_host to its address"
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            raise ConfigError(f"cluster.hosts: {name} has no address ({error}); {fix}") from error
        if is_loopback(address) and len(self._names) > 1:
            raise ConfigError(f"cluster.hosts: {name} is {address} here, which other hosts cannot reach; {fix}")
        return address

    def set_placement(self, placement: Placement) -> None:
        if self._placement is not None:
            check_unmoved(self._placement, placement)
        self._placement = placement
        self._roles |= {role.name: role for role in placement.roles}

    def start(self, role: RoleCommand, log_file: Path, environment: Mapping[str, str]) -> RoleProcess:
        """Start a role: see `role_process.Start`."""
        placed = self._roles[role.name]
        host = self._names[placed.node]
        beats = self._run_dir / ALIVE_FOLDER / role.name
        self._starts += 1
        start = (self._id, str(self._starts), str(beats), str(log_file.absolute()))
        arguments = ("keep", *start, str(self._lease_s), *role.command)
        # The other host does not get CUDA_VISIBLE_DEVICES of this host, so GPU numbers count all GPUs of the other
        # host.
        environment = {**environment, **role_environment(placed, {})}
        return _RemoteProcess(host, self._command(host, *arguments, environment=environment), log_file, self._lease_s)

    def end_left(self, stop: threading.Event) -> Collection[str]:
        with ThreadPoolExecutor(len(self._names)) as threads:
            return {kernel for kernel in threads.map(lambda name: self._end_left(name, stop), self._names) if kernel}

    def _end_left(self, name: str, stop: threading.Event) -> str:
        """End the roles that an earlier launcher left on a host. Return the host's kernel id
        (`ProcessIdentity.kernel`), or "" if the host does not answer."""
        command = self._command(name, "end", str(self._run_dir))
        asked = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        with asked:
            while asked.poll() is None and not stop.wait(ENDED_POLL_S):
                pass
            asked.kill()
            lines = (asked.stdout or ()) if asked.wait() == 0 else ()
            return next((line[len(ENDED) :].strip() for line in lines if line.startswith(ENDED)), "")

    def watch(self, supervisor: Supervisor) -> None:
        pass

    def close(self) -> None:
        pass


def _answer(output: str) -> dict[str, Any] | None:
    """Find the result of `check` among the lines that the host prints at login and logout. `None`: there is no
    result."""
    for line in reversed(output.splitlines()):
        with suppress(ValueError):
            if isinstance(told := json.loads(line), dict) and "version" in told:
                return told
    return None


class _RemoteProcess:
    """A role on `host`, reached through the connection that `command` opens."""

    def __init__(self, host: str, command: Sequence[str], log_file: Path, lease_s: float) -> None:
        self.host, self.pid, self._said = host, 0, b""
        self.identity: ProcessIdentity | None = None
        self.lease_s = lease_s
        self._next, self._lost = 0.0, 0.0
        self._killed: float | None = None
        with opened_log(log_file) as output:
            self._connection = subprocess.Popen(
                ending_with_parent(command, signal.SIGTERM),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        for end in (self._connection.stdin, self._connection.stdout):
            assert end is not None
            os.set_blocking(end.fileno(), False)

    def poll(self) -> int | None:
        now, status = time.monotonic(), self._connection.poll()
        self._read_process()
        if status is None and self._killed is not None and now - self._killed >= KILLED_S:
            log.warning("%s cannot be reached; its role ends within %g s", self.host, self.lease_s)
            self._killed = None
            self._connection.kill()
        if status is None and now >= self._next:
            self._next = now + ALIVE_S
            self._tell(ALIVE)
        if status is not None and self.pid and (status == NO_CONNECTION or status < 0):
            # The role may still run on its host until its lease is over. No second process of the role may start
            # meanwhile.
            self._lost = self._lost or now
            return None if now - self._lost < self.lease_s + LATE_S else NO_CONNECTION
        return status if status is None or status <= SIGNALLED or status == NO_CONNECTION else SIGNALLED - status

    def _read_process(self) -> None:
        assert self._connection.stdout is not None
        if self.pid:
            return
        with suppress(BlockingIOError):
            self._said += os.read(self._connection.stdout.fileno(), READ_BYTES)
        if told := re.search(rb"^%s(\d+) (\S+) (\S+)\n" % STARTED, self._said, re.MULTILINE):
            self.pid = int(told[1])
            self.identity = ProcessIdentity(told[2].decode(), self.pid, told[3].decode())

    def _tell(self, what: bytes) -> None:
        assert self._connection.stdin is not None
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._connection.stdin.fileno(), what)

    def terminate(self) -> None:
        self._tell(STOP)

    def drain(self) -> None:
        self._tell(DRAIN)

    def kill(self) -> None:
        self._tell(KILL)
        self._killed = self._killed or time.monotonic()
