"""`asyncrl sft`: fine-tune the policy on the demonstrations of data.train (docs/sft.md).

`learner.*` and `model.*` mean the same as in training; a step trains on learner.batch_size demonstrations. Without
learner.steps and learner.epochs, the policy trains once on each demonstration. Repeat the command to resume a run that
was stopped or killed.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config import locations
from asyncrl.config.changes import values_of
from asyncrl.config.commands import runnable
from asyncrl.config.load import role_main
from asyncrl.config.locations import CONFIG_FILE, FINE_TUNING_FILE
from asyncrl.config.refusals import ELSEWHERE, missing_data
from asyncrl.config.schema import (
    ClusterConfig,
    CriticConfig,
    DataConfig,
    ImplicitConfig,
    LearnerConfig,
    ModelConfig,
    ScoringConfig,
    SftConfig,
    TrainConfig,
)
from asyncrl.data.demonstrations import check_columns
from asyncrl.errors import ConfigError, DataError, StoppedError
from asyncrl.launch.claim import changes_of, claim, forget_end, is_finished
from asyncrl.launch.local import LEARNER
from asyncrl.launch.ownership import exclusively, stop_of_start
from asyncrl.launch.preflight.learning import warn_of_large_rates
from asyncrl.launch.preflight.models import check_adapters, check_existence, check_freezing, check_tokenizer
from asyncrl.launch.processes import ROLE_ENVIRONMENT, role_command, this_host
from asyncrl.launch.role_process import RoleCommand
from asyncrl.launch.run_folder import store_folders
from asyncrl.launch.supervisor import RunFailedError, Supervisor
from asyncrl.launch.survivors import end_here
from asyncrl.machine import process
from asyncrl.machine.files import write_whole
from asyncrl.runs.environment import record_environment
from asyncrl.runs.fine_tuning import FineTuningTable, write_fine_tuning_summary
from asyncrl.runs.run import Run

log = logging.getLogger("asyncrl.commands.sft")

OWN_DEFAULTS = ("run.name=sft", "learner.group_size=1")
"""Defaults that differ from `asyncrl train`, used without an experiment file. Demonstrations have no groups."""


def run(config: TrainConfig) -> None:
    """Check the models, render the demonstrations, and fine-tune in another process, from the newest checkpoint if
    there is one. A supervisor restarts the process after a failure.

    Raises ConfigError or DataError: the start is refused. Raises StoppedError: a signal or `asyncrl stop` came. Raises
    RunFailedError: the process failed too often.
    """
    stop, learner, run_dir = process.stop_on_signals(), config.learner, locations.run_dir(config.run)
    _refuse(run_dir, learner.nodes, config.data, config.algorithm.sft)
    with exclusively(run_dir), stop_of_start(run_dir, stop) as asked:
        end_here(run_dir, asked)
        # Rendering takes long, so changes of keys that are fixed for a run are refused first.
        changes_of(values_of(config), run_dir)
        for sources in filter(None, (config.data.train, config.data.eval)):
            if not any(source.startswith(ELSEWHERE) for source in sources):
                check_columns(sources)
        # Imported here, since this loads torch, and wrong columns should be refused at once.
        from asyncrl.episode.from_config import prepare_demonstrations

        log.info("checking the models and the demonstrations before anything starts")
        warn_of_large_rates(config.model, config.critic, config.implicit, learner)
        _check_models(config.model, config.critic, config.implicit, config.scoring, learner.optimizer)
        shown = prepare_demonstrations(config, config.data.train, asked)
        if config.data.eval:
            prepare_demonstrations(config, config.data.eval, asked)
        if learner.steps is None:
            learner.steps, learner.epochs = _steps_of_epochs(learner, len(shown)), None
        if is_finished(learner, values_of(config), run_dir):
            return
        _settle(config.cluster)
        resumed = claim(config, run_dir)
        forget_end(run_dir)
        write_whole(run_dir / FINE_TUNING_FILE, "the run of a fine-tuning\n")
        record_environment(run_dir)
        log.info("%s %s; logs are in %s", "resuming" if resumed else "starting", run_dir, run_dir / "logs")
        log.info("to watch it in a browser: %s dashboard %s", runnable(), shlex.quote(str(run_dir)))
        _supervise(run_dir, config.cluster, learner.total_steps, stop)


def _supervise(run_dir: Path, cluster: ClusterConfig, steps: int, stop: threading.Event) -> None:
    """Run the learner and show a table of its numbers on the console. Then print the summary.

    Raises StoppedError: `stop` was set, or `asyncrl stop` came. Raises RunFailedError: the learner failed too often.
    """
    threads = {} if cluster.learner_threads is None else {"OMP_NUM_THREADS": str(cluster.learner_threads)}
    command = role_command("commands.sft.learner", run_dir / CONFIG_FILE)
    supervisor = Supervisor(
        [RoleCommand(LEARNER, command, {**ROLE_ENVIRONMENT, **threads})],
        run_dir,
        cluster.max_restarts,
        LEARNER,
        cluster.restart_pause_s,
        hang_s=cluster.hang_timeout_s,
    )
    run, result, reason = Run(run_dir), "failed", ""
    try:
        with FineTuningTable(run, steps, lambda: supervisor.restarts) as table:
            result = "done" if supervisor.run(stop.is_set, table.update) else "stopped"
    except RunFailedError as error:
        reason = str(error)
        raise
    finally:
        sys.stderr.write(write_fine_tuning_summary(run, steps, result, reason))
    if result == "stopped":
        raise StoppedError("the fine-tuning was stopped before it was done")


def _settle(cluster: ClusterConfig) -> None:
    """Set missing numbers of ranks and threads: one rank for each GPU, and all CPUs divided among the ranks."""
    host = this_host(cluster)
    cluster.learner_ranks = cluster.learner_ranks or max(1, host.gpus)
    if cluster.learner_threads is None and "OMP_NUM_THREADS" not in os.environ:
        cluster.learner_threads = max(1, int(host.cpus) // cluster.learner_ranks)


def _refuse(run_dir: Path, nodes: int, data: DataConfig, sft: SftConfig) -> None:
    """Raises ConfigError: a setting works only in `asyncrl train`, or the folder holds a run of `asyncrl train`. Raises
    DataError: a file is missing."""
    if nodes > 1:
        raise ConfigError(
            f"learner.nodes={nodes}: fine-tuning runs on one host, by default on all its GPUs; leave the key out"
        )
    if data.dataset is not None:
        raise ConfigError(f"data.dataset={data.dataset}: leave it out, and name files of demonstrations in data.train")
    for key, limit in (("data.limit", data.limit), ("data.eval_limit", data.eval_limit)):
        if limit is not None:
            raise ConfigError(f"{key}={limit} counts tasks, and fine-tuning reads all demonstrations: leave it out")
    if sft.path:
        raise ConfigError(
            "algorithm.sft.path is for `asyncrl train`; leave it out, and name files of demonstrations in data.train"
        )
    if store_folders(run_dir):
        raise ConfigError(f"{run_dir} holds a run of `asyncrl train`: choose another run.name")
    if missing := missing_data(data, None):
        raise DataError("\n".join(missing.values()))


def _check_models(
    model: ModelConfig, critic: CriticConfig, implicit: ImplicitConfig, scoring: ScoringConfig, optimizer: str
) -> None:
    """Raises ConfigError: a model does not exist, or cannot be trained with this configuration."""
    from asyncrl.learner.model.optimizer import check_optimizer

    check_existence(model, critic, implicit, scoring)
    check_tokenizer(model)
    check_freezing(model, critic, implicit)
    check_adapters(model, critic, implicit)
    check_optimizer(optimizer)


def _steps_of_epochs(learner: LearnerConfig, demonstrations: int) -> int:
    """The number of steps of `learner.epochs`, by default of one epoch."""
    # 1.1 * 10 is slightly more than 11 in floating point.
    return math.ceil(round((learner.epochs or 1) * -(-demonstrations // learner.batch_size), 6))


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit status."""
    has_file = any(word.startswith("experiment=") for word in argv)
    return role_main(run, argv if has_file else [*OWN_DEFAULTS, *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
