"""`asyncrl train`: checks a run, starts it with the configured launcher, and supervises it until its end."""

from __future__ import annotations

import logging
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from asyncrl.config import locations
from asyncrl.config.changes import values_of
from asyncrl.config.checks.conflicts import conflicts
from asyncrl.config.commands import runnable
from asyncrl.config.exits import EXIT_STOPPED
from asyncrl.config.locations import CONFIG_FILE, refuse_fine_tuning
from asyncrl.config.refusals import refusal_of
from asyncrl.config.schema import LearnerConfig, TrainConfig
from asyncrl.data.from_config import run_tasks
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.autoscale import Autoscaler, RunSizes
from asyncrl.launch.claim import (
    check_begun_files,
    check_resume,
    claim,
    forget_end,
    is_finished,
    is_past_its_steps,
    make_room,
)
from asyncrl.launch.launcher import Launcher, open_launcher
from asyncrl.launch.ownership import OwnerWatch, exclusively, is_asked_to_stop, stop_of_start
from asyncrl.launch.placement.actors import settle_actors
from asyncrl.launch.placement.placement import Placement, place, settle
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.placement.table import placement_table, terminal_width
from asyncrl.launch.placement.together import settle_servers
from asyncrl.launch.plan import run_or_plan
from asyncrl.launch.preflight.algorithm import check_algorithm
from asyncrl.launch.preflight.epochs import count_steps
from asyncrl.launch.preflight.paths import check_paths
from asyncrl.launch.preflight.preflight import preflight
from asyncrl.launch.preflight.settled import check_settled
from asyncrl.launch.preflight.tasks.prompts import prepare_data
from asyncrl.launch.preflight.tasks.same_tasks import check_same_tasks
from asyncrl.launch.preflight.tasks.task_files import read_files
from asyncrl.launch.preflight.tasks.weights import check_weights
from asyncrl.launch.processes import role_command, role_environment, this_host
from asyncrl.launch.role_process import RoleCommand
from asyncrl.launch.scaling import Scaler
from asyncrl.launch.start_warnings import StartWarnings
from asyncrl.launch.supervisor import RunFailedError, Supervisor
from asyncrl.launch.survivors import end_elsewhere, end_here
from asyncrl.machine import process
from asyncrl.runs.card import write_card
from asyncrl.runs.environment import record_environment
from asyncrl.runs.run import COMPLETE, Run
from asyncrl.runs.state.watch import RunWatch
from asyncrl.runs.summary import resume_command
from asyncrl.runs.summary_text import write_summary
from asyncrl.runs.terminal import TerminalTable

log = logging.getLogger("asyncrl.train")

LEARNER = "learner"
"""The role whose end is the end of the run. It runs on the first of the learner's hosts."""


def role_commands(placement: Placement, path: Path) -> list[RoleCommand]:
    """Return the command of every process of a run. All processes read the configuration at `path`, in the run's
    folder, so that a user can edit the original files during the run."""
    return [
        RoleCommand(
            role.name,
            role_command(role.module, path, *role.arguments),
            role_environment(role),
            drains=role.module in ("actor", "scoring"),
            # The replay ends last, since a stopping learner reports its last checkpoint to the replay. The learner's
            # processes on other hosts end last, too, because the learner's first process tells them to stop.
            ends_last=role.module == "replay" or (role.module == "learner" and role.name != LEARNER),
        )
        for role in placement.roles
    ]


def train(
    config: TrainConfig, stop: threading.Event | None = None, how_to_resume: Callable[[], str] | None = None
) -> bool:
    """Run all roles. Return True once the learner is done or its policy solves the tasks, and False if a signal or
    `asyncrl stop` ends the run before.

    If the run has already done all steps of `config`, or more, this starts nothing. Setting `stop` ends the run; by
    default signals set it. `how_to_resume` returns the hint that is printed at the end, by default `asyncrl resume`. On
    each further host of the learner, this runs only the ranks of that host. Raises AsyncrlError: the run cannot start
    or continue.
    """
    try:
        if config.learner.node:
            return _train_on_other_host(config)
        with StartWarnings() as warned:
            return _train(config, stop or process.stop_on_signals(), how_to_resume, warned)
    except StoppedError as error:
        log.info("%s", error)
        return False


def _train(
    config: TrainConfig, stop: threading.Event, how_to_resume: Callable[[], str] | None, warned: StartWarnings
) -> bool:
    """Do the work of `train` on the first host. `warned` collects the warnings until the roles start.

    Raises StoppedError: the run was stopped before it started roles.
    """
    run_dir = locations.run_dir(config.run)
    refuse_fine_tuning(run_dir)
    if is_finished(config.learner, values_of(config), run_dir):
        return True
    check_paths(config.data, config.algorithm, config.model, config.actor, config.scoring, stop)
    tasks = partial(run_tasks, config)
    read = read_files(tasks())
    check_algorithm(config)
    with exclusively(run_dir), ExitStack() as stack:
        asked = stack.enter_context(stop_of_start(run_dir, stop))
        end_here(run_dir, asked)
        log.info("checking data, models and this machine before anything starts")
        check_files = partial(check_begun_files, run_dir, config.data, config.algorithm.sft.path, tasks)
        if config.cluster.launcher == "local":
            stack.enter_context(RunAddresses.of(config).usual_ports())
        preflight(config, partial(check_resume, values_of(config), run_dir, check_files), stop=asked, read=read)
        check_weights(config.replay.shards, tasks())
        count_steps(config.learner, config.replay.shards, tasks())
        launcher = stack.enter_context(closing(open_launcher(config)))
        placement = _placed(config, run_dir, launcher, stop, asked)
        if placement is None:
            return True
        warned.record(run_dir)
        log.info("to watch it in a browser: %s dashboard %s", runnable(), shlex.quote(str(run_dir)))
        places = placement_table(placement, config.cluster.hosts, terminal_width(sys.stderr))
        log.info("where everything runs:\n%s", places)
        supervisor = Supervisor(
            role_commands(placement, run_dir / CONFIG_FILE),
            run_dir,
            config.cluster.max_restarts,
            LEARNER,
            config.cluster.restart_pause_s,
            hang_s=config.cluster.hang_timeout_s,
            drain_s=config.cluster.drain_s,
            start=launcher.start,
        )
        scale = partial(_scale, config, placement.hosts, launcher, supervisor)
        sizes = RunSizes(config.replay.shards, config.learner.batch_size, config.replay.max_lag)
        scaler, autoscaler = Scaler(run_dir, scale), Autoscaler(config.cluster, sizes, run_dir, scale)

        def between_looks() -> None:
            launcher.watch(supervisor)
            scaler.update()
            autoscaler.update()

        return _supervise(supervisor, run_dir, config.learner, sizes.shards, between_looks, stop, how_to_resume)


def _placed(
    config: TrainConfig, run_dir: Path, launcher: Launcher, stop: threading.Event, asked: threading.Event
) -> Placement | None:
    """Place the run's roles, claim its folder, and return the placement, or None if the run has done more steps than
    `config` asks for. The roles can start after this. `stop` is set by signals, `asked` also by `asyncrl stop`.

    Raises StoppedError: the run was asked to stop. Raises ConfigError: the run does not fit the hosts, or must not
    resume.
    """
    placement, engine = place(config, launcher.hosts()), config.engine
    episodes = config.actor.at_once(config.learner.batch_size)
    if launcher.is_one_machine() and settle_servers(engine, config.weights, config.model, episodes, placement):
        log.info("engine.server.per_gpu=%d: several servers on a GPU are faster here", engine.server.together)
        placement = place(config, placement.hosts)
    before = {"cluster.actors": config.cluster.actors, "actor.concurrency": config.actor.concurrency}
    if why := settle_actors(config.actor, config.cluster, engine, config.learner.batch_size, placement):
        log.info("%s", why)
        placement = place(config, placement.hosts)
    settle(config.cluster, config.learner, placement)
    # `prepare` comes before `claim`, so that the configuration in the run's folder has the replay's addresses.
    addresses = RunAddresses.of(config)
    given = addresses.values()
    launcher.prepare(placement, asked)
    check_settled(config, placement)
    end_elsewhere(run_dir, launcher.end_left, asked)
    if stop.is_set() or is_asked_to_stop(run_dir):
        raise StoppedError("stopped before anything was started")
    placement = place(config, placement.hosts)
    prepare_data(config, asked)
    make_room(values_of(config), run_dir, partial(check_same_tasks, run_tasks(config), run_dir))
    resumed = claim(config, run_dir)
    record_environment(run_dir)
    addresses.record_left_open(given, before if why else {})
    if is_past_its_steps(config.learner.total_steps, run_dir):
        return None
    forget_end(run_dir)
    locations.run_identity(config.run, make=True)
    log.info("%s %s; logs are in %s", "resuming" if resumed else "starting", run_dir, run_dir / "logs")
    return placement


def _supervise(
    supervisor: Supervisor,
    run_dir: Path,
    learner: LearnerConfig,
    shards: int,
    between_looks: Callable[[], None],
    stop: threading.Event,
    how_to_resume: Callable[[], str] | None,
) -> bool:
    """Run the roles with a table of the run's numbers on the console, then print the summary. Return True if the
    learner has trained all steps or its policy solves the tasks, and False if `stop` was set or `asyncrl stop` came.
    After each look of the supervisor at the roles, this calls `between_looks`.

    Raises RunFailedError: a role failed too often.
    """
    run, result, reason = Run(run_dir), "failed", ""
    watch, steps = RunWatch(run), learner.total_steps
    try:
        with TerminalTable(run, steps, shards, lambda: supervisor.restarts, waits=lambda: watch.look().text) as table:

            def progress() -> None:
                table.update()
                between_looks()

            result = "done" if supervisor.run(stop.is_set, progress) else "stopped"
            if result == "done" and (reason := run.solved()):
                result = "solved"
    except RunFailedError as error:
        reason = str(error)
        raise
    finally:
        if result in COMPLETE and learner.export:
            _write_card(run_dir)
        resume = how_to_resume() if how_to_resume else resume_command(Run(run_dir))
        sys.stderr.write(write_summary(Run(run_dir), steps, result, reason, resume))
    return result in COMPLETE


def _write_card(run_dir: Path) -> None:
    """Write a model card next to the exported model. The run is done, so an error here only logs a warning."""
    if not (run_dir / "model").is_dir():
        return
    try:
        write_card(Run(run_dir), run_dir / "model")
    except Exception as error:  # noqa: BLE001 - metrics of any version are read here, and a library draws them
        log.warning("no model card was written for %s: %r", run_dir / "model", error)


def _scale(
    config: TrainConfig, hosts: Sequence[Host], launcher: Launcher, supervisor: Supervisor, counts: Mapping[str, int]
) -> None:
    """Change the numbers of actors and scorers. Raises ConfigError: the hosts have no room for them, or the run's
    folder cannot be written."""
    cluster = replace(config.cluster)
    for name, count in counts.items():
        setattr(cluster, name, count)
    scaled = replace(config, cluster=cluster)
    if found := list(conflicts(scaled)):
        raise ConfigError("\n".join(refusal_of(each, scaled) for each in found))
    before, placement = place(config, hosts), place(scaled, hosts)
    launcher.set_placement(placement)
    try:
        locations.record_config(scaled)
    except OSError as error:
        launcher.set_placement(before)  # The earlier roles keep running, and the launcher may have to restart them.
        raise ConfigError(f"the run's folder cannot be written: {error}") from error
    for name, count in counts.items():
        setattr(config.cluster, name, count)
    supervisor.set_roles(role_commands(placement, locations.run_dir(config.run) / CONFIG_FILE))


def _train_on_other_host(config: TrainConfig) -> bool:
    """Run the learner's ranks of this host, with logs in `host-N` of the run's folder.

    If the first host stops the run, its ranks end the ranks here. The ranks here are then restarted, as after a
    failure, until the first host no longer owns the run's folder.
    """
    folder, stop = locations.run_dir(config.run) / f"host-{config.learner.node}", process.stop_on_signals()
    # The first host makes the same placement. Of all processes in it, this host runs only its own ranks of the learner.
    placement = place(config, [this_host(config.cluster)])
    settle(config.cluster, config.learner, placement)
    with exclusively(folder):
        end_here(folder, stop)
        locations.record_config(config, folder)
        record_environment(folder)
        supervisor = Supervisor(
            [each for each in role_commands(placement, folder / CONFIG_FILE) if each.name == LEARNER],
            folder,
            config.cluster.max_restarts,
            LEARNER,
            config.cluster.restart_pause_s,
            hang_s=config.cluster.hang_timeout_s,
        )
        log.info("starting the learner's ranks of host %d; logs are in %s", config.learner.node, folder / "logs")
        first_host = OwnerWatch(locations.run_dir(config.run))
        done = supervisor.run(lambda: stop.is_set() or first_host.has_left(), lambda: None)
        log.info("the ranks of this host %s", "have ended: the learner is done" if done else "were stopped")
        return done


def main(argv: Sequence[str]) -> int:
    """Start the run that a command line describes, or with `--plan` only show its plan. Return the exit status."""
    return run_or_plan(lambda config: 0 if train(config) else EXIT_STOPPED, argv)
