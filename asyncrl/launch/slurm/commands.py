"""Asks Slurm about the job of this process, and makes the commands of the job's steps."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from asyncrl.config.secrets import shown_words
from asyncrl.errors import ConfigError, UnavailableError

JOB_VARIABLE = "SLURM_JOB_ID"
SEED_VARIABLE = "SLURM_ARRAY_TASK_ID"
OF_THE_JOB = ("NTASKS", "NPROCS", "TASKS_PER", "CPUS_PER", "GPUS_PER_TASK", "TRES_PER_TASK", "DISTRIBUTION", "MEM_")
"""Beginnings of the names of variables, after SLURM_. Each step would take options of the job from these variables."""
COMMAND_S = 60.0


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node of the job, the address by which Slurm reaches it, and its component of a heterogeneous job."""

    name: str
    address: str
    group: int | None = None


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job and its nodes; the first node runs the batch script."""

    id: str
    nodes: tuple[SlurmNode, ...]

    @property
    def groups(self) -> list[int | None]:
        """The components of a heterogeneous job; [None] for any other job."""
        return list(dict.fromkeys(node.group for node in self.nodes))


def assumed_job(nodes: int) -> SlurmJob:
    """Make up a job with `nodes` nodes, to show the commands before a real job exists."""
    return SlurmJob("JOB", tuple(SlurmNode(f"node{index}", f"node{index}") for index in range(nodes)))


def this_job(environment: Mapping[str, str] = os.environ) -> SlurmJob:
    """Return the job of this process. Raises ConfigError: the process is not in a job; UnavailableError: Slurm does not
    answer."""
    if JOB_VARIABLE not in environment:
        raise ConfigError(
            "cluster.launcher=slurm: this process is not in a job; submit one: sbatch launchers/slurm_launch.sh "
            "KEY=VALUE"
        )
    size = int(environment.get("SLURM_HET_SIZE", "0"))
    lists: list[tuple[str, int | None]] = [
        (environment[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"], group) for group in range(size)
    ]
    nodes = [
        SlurmNode(name, _address(name), group)
        for names, group in lists or [(environment["SLURM_JOB_NODELIST"], None)]
        for name in ask_slurm("scontrol", "show", "hostnames", names).split()
    ]
    return SlurmJob(environment[JOB_VARIABLE], tuple(nodes))


def _address(node: str) -> str:
    shown = ask_slurm("scontrol", "show", "node", node, "--oneliner").split()
    return next((word.removeprefix("NodeAddr=") for word in shown if word.startswith("NodeAddr=")), node)


def ask_slurm(*command: str) -> str:
    """Run a command of Slurm and return its output. Raises UnavailableError: it fails."""
    said = " ".join(shown_words(command))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{said}: it does not answer within {COMMAND_S:g} s") from error
    except OSError as error:
        raise UnavailableError(f"{said}: {error}") from error
    if done.returncode:
        raise UnavailableError(f"{said}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout


def forget_options_of_job(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove the variables by which sbatch would pass the job's own task options on to every step."""
    for name in [name for name in environment if name.removeprefix("SLURM_").startswith(OF_THE_JOB)]:
        if name.startswith("SLURM_"):
            del environment[name]


def step_command(
    name: str, nodes: Sequence[SlurmNode], options: Sequence[str], container: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Return the command of a step with one task on each of `nodes`, which belong to one component. The steps on a node
    share its processors, memory and GPUs. `options` are more words for srun; `container` are words before the
    command."""
    group = [] if nodes[0].group is None else [f"--het-group={nodes[0].group}"]
    return [
        "srun",
        *group,
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(node.name for node in nodes)}",
        "--overlap",
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        f"--job-name={name}",
        *options,
        *container,
        *command,
    ]


def has_ended_early(job: str) -> bool:
    """True if a job was ended before its time was over, for example by `scancel`; its processes may still run.
    Raises UnavailableError: Slurm does not answer."""
    shown = dict(word.partition("=")[::2] for word in reversed(ask_slurm("scontrol", "show", "job", job).split()))
    try:
        begin, end = (datetime.fromisoformat(shown[name]) for name in ("StartTime", "EndTime"))
        # Slurm computes the end of a job without a time limit as if the limit were a year.
        days, _, clock = shown["TimeLimit"].replace("UNLIMITED", "365-00:00:00").rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return end < begin + timedelta(int(days or 0), hours=hours, minutes=minutes, seconds=seconds)
    except (KeyError, ValueError):
        return False  # The job has no end yet.


def requeue(job: str) -> None:
    """Have Slurm run the job again from its start. This ends the job's processes now. Raises UnavailableError: Slurm
    refuses."""
    ask_slurm("scontrol", "requeue", job)
