"""A real Slurm cluster of this machine: munged, slurmctld, and slurmd on nodes with addresses of their own.

Each node is a network namespace with a host name, joined to the others by a bridge. Everything is in one folder, and no
configuration of the machine is read or changed. `python -m tests.slurm.cluster FOLDER` starts a cluster for use by hand
and prints what to set, until Ctrl-C.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from asyncrl.machine.ports import free_ports
from tests.helpers import until

NEEDED = (
    "munged",
    "slurmctld",
    "slurmd",
    "srun",
    "sbatch",
    "scontrol",
    "scancel",
    "squeue",
    "ip",
    "nsenter",
    "unshare",
)
SUBNET = "10.213.8"
HEAD = f"{SUBNET}.1"
START_S = 90.0
RAY_FOLDER = "/tmp/ray"


class ClusterError(Exception):
    """The cluster cannot start here; the message says why."""


def missing() -> str:
    """Why this machine can have no cluster; empty where it can."""
    if lacking := [name for name in NEEDED if shutil.which(name) is None]:
        return f"not installed: {', '.join(lacking)} (apt-get install slurm-wlm munge iproute2)"
    return "" if os.geteuid() == 0 else "Slurm's daemons and network namespaces need root"


@dataclass(frozen=True, slots=True)
class _Node:
    name: str
    address: str
    namespace: str


class SlurmCluster:
    """A cluster within `folder` until a `with` block ends. Each of its `nodes` says that it has `cpus` processors, and
    `gpus` GPUs, which are device files that no program opens."""

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 2, gpus: int = 0) -> None:
        self._folder, self._cpus, self._gpus = folder, cpus, gpus
        tag = f"as{os.getpid() % 100000}"
        self._bridge = f"{tag}br"
        self._nodes = [_Node(f"n{each}", f"{SUBNET}.{10 + each}", f"{tag}n{each}") for each in range(1, nodes + 1)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a program that uses the cluster."""
        variables = {"SLURM_CONF": str(self._folder / "slurm.conf"), "ASYNCRL_PYTHON": sys.executable}
        return {**os.environ, **variables}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._stop_daemons)
            self._write_files()
            self._lay_cables(stack)
            socket = self._folder / "munge.socket"
            munge = ["munged", "--foreground", f"--socket={socket}", f"--key-file={self._folder / 'munge.key'}"]
            munge += [
                f"--{name}={self._folder / f'munge.{name[:4]}'}" for name in ("log-file", "pid-file", "seed-file")
            ]
            # munged refuses a folder that others of the machine may write, and /tmp is one.
            self._start("munged", [*munge, "--force"])
            _wait(socket.exists, "munged", self._folder)
            self._start("slurmctld", _as_host("head", f"slurmctld -D -f {self._folder / 'slurm.conf'}"))
            for node in self._nodes:
                self.start_node(node.name)
            _wait(self._is_idle, "the nodes", self._folder)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.run("scancel", "--state=RUNNING,PENDING,SUSPENDED", "--full", "--user=root", check=False)
        self._stack.close()

    def run(self, *command: str, check: bool = True) -> str:
        """Run a program that uses the cluster, such as squeue, and return its output."""
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        if check and done.returncode:
            raise ClusterError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        node = next(each for each in self._nodes if each.name == name)
        # `ip netns exec` would hide the control groups that slurmd looks for.
        enter = ["nsenter", f"--net=/run/netns/{node.namespace}"]
        own = self._folder / f"ray-of-{name}"
        own.mkdir(exist_ok=True)
        # Ray keeps what it knows of its node in this folder, which nodes do not share.
        mounts = f"mkdir -p {RAY_FOLDER}; mount --bind {own} {RAY_FOLDER}; "
        slurmd = f"slurmd -D -N {name} -f {self._folder / 'slurm.conf'}"
        self._start(name, [*enter, *_as_host(name, slurmd, mounts)])

    def kill_node(self, name: str) -> None:
        """Kill everything on a node, as a loss of power does, and tell the controller that the node is down."""
        node = next(each for each in self._nodes if each.name == name)
        _kill_all(node)
        self._daemons.pop(name).wait()
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=killed")

    def heal_node(self, name: str) -> None:
        """Start a killed node again."""
        self.start_node(name)
        self.run("scontrol", "update", f"nodename={name}", "state=resume")
        _wait(self._is_idle, name, self._folder)

    def _is_idle(self) -> bool:
        states = self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False).split()
        return len(states) == len(self._nodes) and all(state in ("idle", "mixed", "allocated") for state in states)

    def _write_files(self) -> None:
        folder = self._folder
        for name in ("state", "log", *(f"spool/{node.name}" for node in self._nodes)):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        gpus = [folder / f"gpu{index}" for index in range(self._gpus)]
        for minor, each in enumerate(gpus):
            os.mknod(each, stat.S_IFCHR | 0o600, os.makedev(1, 3 + minor))
        (folder / "gres.conf").write_text("".join(f"Name=gpu File={each}\n" for each in gpus))
        self._port = free_ports(2)
        (folder / "slurm.conf").write_text(self._configuration())

    def _configuration(self) -> str:
        gres, folder = f" Gres=gpu:{self._gpus}" if self._gpus else "", self._folder
        nodes = "".join(
            f"NodeName={node.name} NodeAddr={node.address} NodeHostname={node.name} CPUs={self._cpus} RealMemory=4000 "
            f"State=UNKNOWN{gres}\n"
            for node in self._nodes
        )
        # A requeued job waits until its credentials have expired, two minutes by default.
        return f"""ClusterName=asyncrl
SlurmctldHost=head({HEAD})
SlurmctldPort={self._port}
SlurmdPort={self._port + 1}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=15
OverTimeLimit=0
InactiveLimit=0
MinJobAge=300
{"GresTypes=gpu" if self._gpus else ""}
{nodes}PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""

    def _lay_cables(self, stack: ExitStack) -> None:
        def ip(words: str) -> None:
            done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
            if done.returncode:
                raise ClusterError(f"this machine grants no network: ip {words}: {done.stderr.strip()}")

        def remove(words: str) -> None:
            stack.callback(subprocess.run, ["ip", *words.split()], check=False)

        ip(f"link add {self._bridge} type bridge")
        remove(f"link del {self._bridge}")
        ip(f"addr add {HEAD}/24 dev {self._bridge}")
        ip(f"link set {self._bridge} up")
        for node in self._nodes:
            ip(f"netns add {node.namespace}")
            remove(f"netns del {node.namespace}")
            cable = f"{node.namespace}v"
            ip(f"link add {cable} type veth peer name eth0 netns {node.namespace}")
            ip(f"link set {cable} master {self._bridge} up")
            for words in ("link set lo up", f"addr add {node.address}/24 dev eth0", "link set eth0 up"):
                ip(f"-n {node.namespace} {words}")

    def _start(self, name: str, command: list[str]) -> None:
        output = (self._folder / "log" / f"{name}.out").open("ab")
        with output:
            self._daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.environment
            )

    def _stop_daemons(self) -> None:
        for node in self._nodes:
            _kill_all(node)
        for daemon in self._daemons.values():
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(START_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _kill_all(node: _Node) -> None:
    """Kill the processes on a node until there are none: some may start others, or end, after they were listed."""

    def killed() -> bool:
        listed = subprocess.run(["ip", "netns", "pids", node.namespace], capture_output=True, text=True)
        for pid in listed.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        return not listed.stdout

    until(killed)


def _as_host(name: str, command: str, mounts: str = "") -> list[str]:
    """The command with a host name of its own, by which Slurm's daemons know themselves. `mounts` are words of a shell
    that make mounts, which no other process sees."""
    return ["unshare", "--uts", "--mount", "sh", "-c", f"hostname {name}; {mounts}exec {command}"]


def _wait(condition: Callable[[], bool], what: str, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} did not start within {START_S:.0f} s; see {folder / 'log'}")
        time.sleep(0.1)


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    if reason := missing():
        sys.exit(reason)
    with SlurmCluster(folder, nodes=3, gpus=4) as cluster:
        sys.stdout.write(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}\n")
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.pause()


if __name__ == "__main__":
    main()
