"""`asyncrl sft`: fine-tune the policy on the demonstrations of data.train (docs/sft.md).

`learner.*` and `model.*` mean the same as in training; a step trains learner.batch_size demonstrations. Without
learner.steps and learner.epochs, all demonstrations are trained once. Repeat the command to resume a run that was
stopped or killed.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from asyncrl.config import locations
from asyncrl.config.changes import values_of
from asyncrl.config.load import role_main
from asyncrl.config.locations import CONFIG_FILE, FINE_TUNING_FILE
from asyncrl.config.schema import (
    ClusterConfig,
    CriticConfig,
    ImplicitConfig,
    LearnerConfig,
    ModelConfig,
    ScoringConfig,
    SftConfig,
    TrainConfig,
)
from asyncrl.errors import ConfigError
from asyncrl.launch.claim import changes_of, claim
from asyncrl.launch.ownership import LOOK_S, StopRequests, exclusively
from asyncrl.launch.preflight.models import check_adapters, check_existence, check_freezing, check_tokenizer
from asyncrl.launch.processes import role_command, this_host
from asyncrl.launch.run_folder import store_folders
from asyncrl.learner.ranks.launcher import Membership, Timeouts, run_ranks
from asyncrl.machine import process
from asyncrl.machine.activity import Activity
from asyncrl.machine.files import write_whole

log = logging.getLogger("asyncrl.commands.sft")

OWN_DEFAULTS = ("run.name=sft", "learner.group_size=1")
"""Defaults that differ from `asyncrl train`, used without an experiment file. Demonstrations have no groups."""


def run(config: TrainConfig) -> None:
    """Fine-tune, from the newest checkpoint if there is one. Raises StoppedError: a signal came."""
    stop, activity, cluster = process.stop_on_signals(), Activity(), config.cluster
    is_rank_of_several = Membership.of_this_process() is not None
    with ExitStack() as stack:
        if not is_rank_of_several:
            stack.enter_context(_prepared(config, stop))
        if is_rank_of_several or cluster.ranks == 1:
            process.set_at_once(stop)
            process.limit_threads(cluster.learner_threads)
            from asyncrl.commands.sft.from_config import run_rank

            run_rank(config, stop, activity)
        else:
            path, limit_s = locations.run_dir(config.run) / CONFIG_FILE, config.learner.rank_timeout_s
            command = role_command("commands.sft", path)
            run_ranks(command, cluster.ranks, stop, Timeouts.within(limit_s), activity=activity)


@contextmanager
def _prepared(config: TrainConfig, stop: threading.Event) -> Iterator[None]:
    """Check the models, render the demonstrations and complete the configuration.

    Until the block ends, this process owns the run's folder.
    """
    from asyncrl.episode.from_config import prepare_demonstrations

    learner, run_dir = config.learner, locations.run_dir(config.run)
    _refuse(run_dir, learner.nodes, config.data.dataset, config.algorithm.sft)
    with exclusively(run_dir):
        threading.Thread(target=_watch_requests, args=[run_dir, stop], name="stop-requests", daemon=True).start()
        changes_of(values_of(config), run_dir)  # Refuse a wrong resume before rendering.
        _check_models(config.model, config.critic, config.implicit, config.scoring, learner.optimizer)
        shown = prepare_demonstrations(config, config.data.train, stop)
        if config.data.eval:
            prepare_demonstrations(config, config.data.eval, stop)
        if learner.steps is None:
            learner.steps, learner.epochs = _steps_of_epochs(learner, len(shown)), None
        _settle(config.cluster)
        resumed = claim(config, run_dir)
        write_whole(run_dir / FINE_TUNING_FILE, "the run of a fine-tuning\n")
        log.info("%s %s: %d steps", "resuming" if resumed else "starting", run_dir, learner.total_steps)
        yield
        if learner.export:
            log.info("the fine-tuned model is in %s", run_dir / "model")


def _watch_requests(run_dir: Path, stop: threading.Event) -> None:
    """Set `stop` when `asyncrl stop` requests it."""
    requests = StopRequests(run_dir)
    while not stop.wait(LOOK_S):
        if requests.arrived():
            stop.set()


def _settle(cluster: ClusterConfig) -> None:
    """Set missing numbers of ranks and threads: one rank for each GPU, and all CPUs divided among the ranks."""
    host = this_host(cluster)
    cluster.learner_ranks = cluster.learner_ranks or max(1, host.gpus)
    if cluster.learner_threads is None and "OMP_NUM_THREADS" not in os.environ:
        cluster.learner_threads = max(1, int(host.cpus) // cluster.learner_ranks)


def _refuse(run_dir: Path, nodes: int, dataset: str | None, sft: SftConfig) -> None:
    """Raises ConfigError: a setting works only in `asyncrl train`."""
    if nodes > 1:
        raise ConfigError(f"learner.nodes={nodes}: fine-tuning runs on one host; set cluster.learner_ranks to its GPUs")
    if dataset is not None:
        raise ConfigError(f"data.dataset={dataset}: fine-tuning needs files of demonstrations: name them in data.train")
    if sft.path:
        raise ConfigError("algorithm.sft.path is for `asyncrl train`: name the demonstrations in data.train")
    if store_folders(run_dir):
        raise ConfigError(f"{run_dir} holds a run of `asyncrl train`: choose another run.name")


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
    return math.ceil((learner.epochs or 1) * -(-demonstrations // learner.batch_size))


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit status."""
    has_file = any(word.startswith("experiment=") for word in argv)
    return role_main(run, argv if has_file else [*OWN_DEFAULTS, *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
