"""`python -m asyncrl.launch.slurm.job KEY=VALUE ...`, which the batch scripts in `launchers/` call: a run in a job.

It runs `asyncrl train cluster.launcher=slurm`. Slurm sends SIGUSR1 shortly before the job's time is over. Then all
roles stop, the learner saves a checkpoint, and the job is requeued. The run resumes when Slurm starts the job again.

In a job array each task is a separate run, with the task's number as its seed and at the end of its name. A job of a
chain (`chain.py`) is not requeued: the next job resumes. With `cluster.launcher=ray` the run uses the nodes of the
job as a Ray cluster (`ray_nodes.py`). `--dry-run` prints where each role would be, and every command.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from asyncrl.config import locations
from asyncrl.config.exits import EXIT_STOPPED, EXIT_USAGE
from asyncrl.config.load import role_main
from asyncrl.config.locations import CONFIG_FILE
from asyncrl.config.schema import ClusterConfig, RunConfig, TrainConfig
from asyncrl.config.secrets import shown_words
from asyncrl.data.from_config import run_tasks
from asyncrl.errors import ConfigError, StoppedError, UnavailableError
from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.local import role_commands, train
from asyncrl.launch.placement.placement import place, settle
from asyncrl.launch.placement.table import placement_table, terminal_width
from asyncrl.launch.preflight.algorithm import check_algorithm
from asyncrl.launch.preflight.epochs import count_steps
from asyncrl.launch.preflight.settled import check_plan
from asyncrl.launch.slurm.chain import DRY_RUN, ChainLink
from asyncrl.launch.slurm.chain import OPTION as CHAINED
from asyncrl.launch.slurm.commands import (
    JOB_VARIABLE,
    SEED_VARIABLE,
    SlurmJob,
    assumed_job,
    forget_options_of_job,
    has_ended_early,
    requeue,
    this_job,
)
from asyncrl.launch.slurm.launcher import SlurmLauncher
from asyncrl.launch.slurm.ray_nodes import RayNodes, starts_ray
from asyncrl.launch.slurm.step import NodeReport
from asyncrl.machine import process
from asyncrl.runs.run import Run
from asyncrl.version import VERSION

log = logging.getLogger("asyncrl.slurm")

DEFAULTS = ("cluster.launcher=slurm", "network.replay_port=0", "network.weights_port=0")
"""Options that come before the user's options, so that the user's options can replace them. Free ports are chosen,
because several jobs may share a node."""
OPTIONS = ("-c", "--cfg", "--config-dir")
"""The options of every command that takes KEY=VALUE."""
USAGE = """usage: sbatch [OPTIONS OF SBATCH] slurm_launch.sh KEY=VALUE ...      a run as a job
       slurm_launch.sh --dry-run KEY=VALUE ...                       print its placement and every command
       slurm_launch.sh --chain N [OPTIONS OF SBATCH] KEY=VALUE ...   N jobs in sequence; each resumes the run
       slurm_launch.sh --chain N --dry-run [OPTIONS] KEY=VALUE ...   print the commands that submit them

KEY=VALUE are those of `asyncrl train --help`. docs/cluster.md has the rest.
"""


def name_task(run: RunConfig, environment: Mapping[str, str]) -> None:
    """Give the run of a task of a job array its own seed and name. The run of any other job stays as it is."""
    if number := environment.get(SEED_VARIABLE):
        run.seed, run.name = int(number), f"{run.name}-{number}"


def check_launcher(launcher: str) -> None:
    """Raises ConfigError: the roles would not be on the nodes of the job."""
    if launcher not in ("slurm", "ray"):
        raise ConfigError(
            f"cluster.launcher={launcher}: this script starts the roles as steps of a job of Slurm, or "
            "with ray on a Ray cluster of its nodes; leave out this option, or start the run by `asyncrl train`"
        )


class Job:
    """This job, which may be a `link` of a chain. `stop` is set by Slurm's notice that the job's time ends, or by a
    signal that ends the job."""

    def __init__(self, link: ChainLink | None = None) -> None:
        self._link = link
        self._notice = threading.Event()
        self.stop = process.stop_on_signals()
        signal.signal(signal.SIGUSR1, self._on_notice)

    def _on_notice(self, number: int, frame: FrameType | None) -> None:
        goes_on = "the next job of the chain resumes" if self._link else "requeueing the job"
        log.info("the job's time is nearly over: saving, and %s", goes_on)
        self._notice.set()
        process.set_in_handler(self.stop)

    def run(self, config: TrainConfig) -> int:
        """Train, and requeue the job if its time ended before the run did. Return the exit status."""
        check_launcher(config.cluster.launcher)
        check_algorithm(config)
        forget_options_of_job()
        name_task(config.run, os.environ)
        link = self._link
        run_dir = locations.run_dir(config.run)
        if link:
            count_steps(config.learner, config.replay.shards, run_tasks(config))
        if link and (reason := link.why_nothing_is_left(run_dir, config.learner.total_steps)):
            log.info("%s has nothing to do: %s", link, reason)
            return 0
        job = this_job()  # Asks Slurm now: a failure shows before the slow checks.
        try:
            with self._ray(config.cluster, RunAddresses.of(config), job):
                done = train(config, self.stop, self._how_to_resume)
        except StoppedError as error:
            log.info("%s", error)
            done = False
        if done:
            if link and Run(run_dir).end() == "solved":
                link.end(run_dir)
            return 0
        if link and not self.stop.is_set():  # No signal came, so `asyncrl stop` has stopped the run.
            link.end(run_dir)
        if not self._notice.is_set():
            return EXIT_STOPPED
        if link is None:
            return requeue_this_job()
        if link.is_last:
            raise UnavailableError(f"{link} was the last, and the run is not done: submit it again to resume the run")
        return 0

    @contextmanager
    def _ray(self, cluster: ClusterConfig, addresses: RunAddresses, job: SlurmJob) -> Iterator[None]:
        """Start a Ray cluster on the job's nodes if the run needs one, until the block ends. Raises StoppedError."""
        if not starts_ray(cluster, os.environ):
            yield
            return
        launcher = SlurmLauncher(cluster, addresses, job)
        with RayNodes(cluster, addresses.run_dir, launcher).running(self.stop):
            yield

    def _how_to_resume(self) -> str:
        """Explain to people how the run continues after this job."""
        is_stopped_by_hand = not self._notice.is_set()
        if self._link is not None and not self._link.is_last and not is_stopped_by_hand:
            return "the next job of the chain resumes it"
        if self._link is None and not is_stopped_by_hand:
            return "Slurm runs this job again, which resumes it"
        return "submit this job again by sbatch, with the same words"


def requeue_this_job() -> int:
    """Requeue the job, and return the exit status of this process: 130 if `scancel` has ended the job meanwhile.

    Raises UnavailableError: Slurm refuses.
    """
    job = os.environ[JOB_VARIABLE]
    try:
        if has_ended_early(job):
            log.info("the job was cancelled, so it is not requeued")
            return EXIT_STOPPED
        requeue(job)
        return 0
    except UnavailableError as error:
        raise UnavailableError(
            f"the job was not requeued: {error}; submit it again, and the run resumes, or submit several jobs at once: "
            "launchers/slurm_launch.sh --chain N"
        ) from error


def show(config: TrainConfig) -> None:
    """Print where each role would be, and every command. Starts nothing. Outside of a job it shows the nodes of
    `cluster.pools`.
    """
    check_launcher(config.cluster.launcher)
    check_algorithm(config)
    name_task(config.run, os.environ)
    job = this_job() if JOB_VARIABLE in os.environ else assumed_job(len(_pool_nodes(config.cluster)))
    launcher = SlurmLauncher(config.cluster, RunAddresses.of(config), job, _assumed_reports(config.cluster, job))
    placement = place(config, launcher.hosts())
    check_plan(config, placement, launcher.is_one_machine())
    settle(config.cluster, config.learner, placement)
    launcher.set_placement(placement)
    run_dir = locations.run_dir(config.run)
    path = run_dir / CONFIG_FILE
    commands, roles = launcher.look_commands(path.absolute().with_name(".canary-ID")), role_commands(placement, path)
    if starts_ray(config.cluster, os.environ):
        # Ray itself starts the roles, each in a Ray actor, so their commands need no srun.
        nodes = RayNodes(config.cluster, run_dir, launcher)
        commands += [*nodes.commands().values(), *(list(role.command) for role in roles)]
    else:
        commands += map(launcher.role_command, roles)
    table = placement_table(placement, [node.name for node in job.nodes], terminal_width(sys.stdout))
    sys.stdout.write(table + "\n" + "\n".join(shlex.join(shown_words(each)) for each in commands) + "\n")


def _pool_nodes(cluster: ClusterConfig) -> list[dict[str, int]]:
    """Return the settings of each node of the pools."""
    pools = [pool for pool in cluster.pools.values() for _ in range(pool.get("nodes", 1))]
    return pools or [{}]


def _assumed_reports(cluster: ClusterConfig, job: SlurmJob) -> list[NodeReport]:
    """Assume the GPUs and CPUs of each node: those that the pools name, else those of this node of the job, else the
    configured ones."""
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", cluster.gpus or 0))
    cpus = int(os.environ.get("SLURM_CPUS_ON_NODE", cluster.cpus or os.cpu_count() or 1))
    asked = [*_pool_nodes(cluster), *({} for _ in job.nodes)]
    return [
        NodeReport(node.name, pool.get("gpus", gpus), pool.get("cpus", cpus), node.address, 0, True, VERSION)
        for node, pool in zip(job.nodes, asked, strict=False)
    ]


def main(words: Sequence[str]) -> int:
    """Run, or show, the job that the words of the batch script describe, and return the exit status."""
    if {"-h", "--help"} & set(words):
        sys.stdout.write(USAGE)
        return 0
    links = [ChainLink.of(word) for word in words if word.startswith(CHAINED)]
    job = Job(*links[:1])
    given = [*DEFAULTS, *(word for word in words if word != DRY_RUN and not word.startswith(CHAINED))]
    if others := [word for word in given if word.startswith("-") and not word.startswith(OPTIONS)]:
        sys.stderr.write(
            f"asyncrl: {' '.join(others)}: the script takes KEY=VALUE and, as its first word, {DRY_RUN} or --chain N; "
            "options of sbatch come before the script, or after --chain N; without a job, cluster.pools says which "
            f"nodes {DRY_RUN} assumes\n"
        )
        return EXIT_USAGE
    return role_main(show if DRY_RUN in words else job.run, given, reads_data=DRY_RUN not in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
