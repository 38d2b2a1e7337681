"""Runs a Ray cluster inside a job of Slurm: `launchers/slurm_launch.sh cluster.launcher=ray KEY=VALUE ...`.

Steps of the job start a Ray head on its first node and a Ray node on each other node. This cluster ends with the job.
The batch script, on the first node, runs the same command as on any Ray cluster. A step that ends early is started
again, except for the head: without the head there is no cluster.

A custom resource keeps the replay on the first node. A requeued job may get other nodes, so the store must be in the
run's folder, which all nodes share. A client of a Ray cluster can run any code there, so this cluster requires a token.
The token is in a file of the run's folder that only its owner can read.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from asyncrl.config.schema import ClusterConfig
from asyncrl.errors import ConfigError, StoppedError, UnavailableError
from asyncrl.launch.ray.cluster import ADDRESS_VARIABLE, RayCluster, ray_module
from asyncrl.launch.slurm.launcher import SlurmLauncher
from asyncrl.machine.child import kill_group, last_lines, start_child

log = logging.getLogger(__name__)

REPLAY_RESOURCE = "asyncrl_replay"
TOKEN_FILE = "ray-token"
"""The file in the run's folder with the token of its cluster."""
AUTH_MODE, AUTH_VARIABLES = "RAY_AUTH_MODE", ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Environment variables of Ray that restrict who may connect."""
START_S = 300.0
"""All nodes must have joined within this many seconds: Python may start slowly from a network disk."""
END_S = 10.0
"""The longest wait for all nodes to end. It is short, since the job's time may be nearly over."""
POLL_S = 1.0
WATCH_S = 5.0
"""The pause between two looks at the steps."""
TOLD_LINES = 5
OBJECTS_BYTES = 256 << 20
"""The memory of each node for Ray's objects, which are small in a run. By default Ray would take a third of the node's
memory."""


def starts_ray(cluster: ClusterConfig, environment: Mapping[str, str]) -> bool:
    """True if the job must start a Ray cluster: the run wants Ray, and names no existing cluster."""
    named = cluster.ray.address or environment.get(ADDRESS_VARIABLE)
    return cluster.launcher == "ray" and not named


def ask_for_token(run_dir: Path, environment: MutableMapping[str, str]) -> None:
    """Change `environment` so that the Ray nodes and clients that get it use the run's token. The token is made if it
    is missing. Nothing changes if the environment already restricts who may connect."""
    if any(name in environment for name in AUTH_VARIABLES):
        return
    file = run_dir.absolute() / TOKEN_FILE
    if not file.exists():
        # Made under another name, so that a job that is killed here leaves no empty token.
        partial = file.with_name(f".{TOKEN_FILE}")
        partial.unlink(missing_ok=True)
        partial.touch(0o600)
        partial.write_text(secrets.token_hex(32))
        partial.rename(file)
    environment.update({AUTH_MODE: "token", "RAY_AUTH_TOKEN_PATH": str(file)})


class RayNodes:
    """The steps of a job that are the nodes of its Ray cluster. `launcher` knows the nodes of the job.

    Raises ConfigError: Ray is not installed, or a node cannot be used.
    """

    def __init__(self, cluster: ClusterConfig, run_dir: Path, launcher: SlurmLauncher) -> None:
        self._cluster, self._run_dir, self._launcher = cluster, run_dir.absolute(), launcher

    @property
    def address(self) -> str:
        """The address of the cluster: the first node's address, and a port that was free on this node."""
        head = self._launcher.reports()[0]
        return f"{head.address}:{head.port}"

    def commands(self) -> dict[str, list[str]]:
        """Map the name of each step's log to the step's command. The head is first."""
        reports, commands = self._launcher.reports(), dict[str, list[str]]()
        for number, (report, host) in enumerate(zip(reports, self._launcher.hosts(), strict=True)):
            words = [f"--node-ip-address={report.address}", f"--num-cpus={host.cpus}", f"--num-gpus={host.gpus}"]
            words += [f"--object-store-memory={OBJECTS_BYTES}"]
            if number:
                words.append(f"--address={self.address}")
            else:
                # Jobs may share a node, so Ray's default ports may be taken.
                words += ["--head", f"--port={report.port}", f"--ray-client-server-port={report.port + 1}"]
                words += [f"--resources={json.dumps({REPLAY_RESOURCE: 1})}"]
                words += ["--include-dashboard=false", "--disable-usage-stats"]
            start = [self._launcher.python, "-m", "ray.scripts.scripts", "start", "--block", *words]
            name = f"ray-{report.name}" if number else "ray-head"
            commands[name] = self._launcher.step(name, number, start)
        return commands

    @contextmanager
    def running(self, stop: threading.Event) -> Iterator[None]:
        """Start all nodes, and set the cluster's address in the configuration once they have joined. When the block
        ends, end all nodes. Raises StoppedError; UnavailableError: the nodes do not join."""
        logs = self._run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        ask_for_token(self._run_dir, os.environ)  # Ray reads this when it is imported.
        ray_module()
        steps = _Steps(self.commands(), logs)
        try:
            ray = self._cluster.ray
            ray.address = self.address
            ray.replay_resource = ray.replay_resource or REPLAY_RESOURCE
            self._wait(steps, stop)
            log.info("the Ray cluster of this job is at %s, with %d nodes", self.address, len(self._launcher.reports()))
            with steps.kept():
                yield
        finally:
            steps.end()

    def _wait(self, steps: _Steps, stop: threading.Event) -> None:
        """Return once all nodes have joined."""
        deadline, count, problem = time.monotonic() + START_S, len(self._launcher.reports()), ""
        while time.monotonic() < deadline:
            if stop.is_set():
                raise StoppedError("stopped while the nodes of the Ray cluster started")
            steps.check()
            try:
                with closing(RayCluster(self._cluster)) as cluster:
                    joined = len(cluster.addresses())
                if joined >= count:
                    return
                problem = f"{joined} of {count} nodes have joined"
            except ConfigError as error:
                problem = str(error)
            stop.wait(POLL_S)
        raise UnavailableError(f"the Ray cluster of this job did not start within {START_S:g} s: {problem}")


class _Steps:
    """The srun processes of the Ray nodes, each with its own log in `logs`."""

    def __init__(self, commands: Mapping[str, list[str]], logs: Path) -> None:
        self._commands, self._logs = commands, logs
        self._running = {name: self._start(name) for name in commands}
        self._ends = threading.Event()

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        return start_child(self._commands[name], self._log_of(name), {}, near_gpus=False)

    def _log_of(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def check(self) -> None:
        """Raises UnavailableError: a step has ended."""
        for name, step in self._running.items():
            if step.poll() is not None:
                raise UnavailableError(
                    f"{name} ended with status {step.returncode}:\n{last_lines(self._log_of(name), TOLD_LINES)}"
                )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Have a thread restart each step that ends, until the block ends."""
        # The kernel ends a child when the thread that started it ends, so the new thread stays until all steps have
        # ended.
        threading.Thread(target=self._keep, name="ray-nodes", daemon=True).start()
        try:
            yield
        finally:
            self._ends.set()

    def _keep(self) -> None:
        head, *others = self._running
        while not self._ends.wait(WATCH_S):
            if (status := self._running[head].poll()) is not None:
                log.error("%s ended with status %d, and the cluster with it", head, status)
                break
            for name in others:
                if (status := self._running[name].poll()) is not None:
                    log.warning("%s ended with status %d; starting it again", name, status)
                    self._running[name] = self._start(name)
        for step in self._running.values():
            step.wait()

    def end(self) -> None:
        """End all steps: srun kills its step when it gets SIGTERM."""
        self._ends.set()
        for step in self._running.values():
            step.terminate()
        deadline = time.monotonic() + END_S
        for step in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                step.wait(max(0.0, deadline - time.monotonic()))
            kill_group(step)
