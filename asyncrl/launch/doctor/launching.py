"""Finds out if this host can start a run with the run's `cluster.launcher`: Ray, a shell on each host, or Slurm."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from asyncrl.config.schema import ClusterConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.doctor.facts import LauncherFact
from asyncrl.launch.doctor.sharing import connection_error
from asyncrl.launch.ray.cluster import ray_module

SHELL_S = 20.0
SLURM = ("sbatch", "srun", "scontrol")


def launcher_facts(cluster: ClusterConfig) -> list[LauncherFact]:
    """Return the launcher's requirements on this host. A run on this host alone has none."""
    if cluster.launcher == "ray":
        return list(_ray(cluster.ray.address))
    if cluster.launcher == "hosts":
        with ThreadPoolExecutor(len(cluster.hosts) or 1) as threads:
            return list(threads.map(partial(_shell, cluster.shell), cluster.hosts))
    if cluster.launcher == "slurm":
        return [LauncherFact(name, "" if shutil.which(name) else "the program is not installed") for name in SLURM]
    return []


def _ray(address: str | None) -> Iterator[LauncherFact]:
    try:
        ray_module()
    except ConfigError as error:
        yield LauncherFact("ray", str(error))
    else:
        yield LauncherFact("ray")
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal():
        yield LauncherFact(f"cluster.ray.address={address}", connection_error(host, int(port)))


def _shell(shell: list[str], host: str) -> LauncherFact:
    """Try to run a command on a host by `shell` (cluster.shell)."""
    command, reached = [word.replace("{host}", host) for word in shell], f"a shell on {host}"
    try:
        done = subprocess.run(
            [*command, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SHELL_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return LauncherFact(reached, str(error))
    said = " ".join(done.stderr.strip().splitlines()[-2:])
    return LauncherFact(reached, (said or f"status {done.returncode}") if done.returncode else "")
