"""`asyncrl sft`: fine-tune the policy on the demonstrations of data.train (docs/sft.md).

`learner.*` and `model.*` mean the same as in training; a step trains learner.batch_size demonstrations. Without
learner.steps and learner.epochs it goes through all of them once. The same command resumes a run that was stopped or
killed.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from pathlib import Path

from asyncrl.config import locations
from asyncrl.config.load import role_main
from asyncrl.config.locations import CONFIG_FILE, FINE_TUNING_FILE
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.local import changes_of, claim
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
"""What differs from `asyncrl train` without the file of an experiment: demonstrations have no groups."""


def run(config: TrainConfig) -> None:
    """Fine-tune, from the newest checkpoint if there is one. Raises StoppedError on a signal."""
    stop, activity = process.stop_on_signals(), Activity()
    if Membership.of_this_process() is None:
        _start(config, stop, activity)
    else:
        _run_rank(config, stop, activity)


def _start(config: TrainConfig, stop: threading.Event, activity: Activity) -> None:
    _refuse(config)
    run_dir = locations.run_dir(config.run)
    with exclusively(run_dir):
        threading.Thread(target=_watch_requests, args=[run_dir, stop], name="stop-requests", daemon=True).start()
        changes_of(config, run_dir)  # A resume that is refused renders nothing.
        _prepare(config, stop)
        _settle(config)
        resumed = claim(config, run_dir)
        write_whole(run_dir / FINE_TUNING_FILE, "the run of a fine-tuning\n")
        log.info("%s %s: %d steps", "resuming" if resumed else "starting", run_dir, config.learner.total_steps)
        if config.cluster.ranks == 1:
            _run_rank(config, stop, activity)
        else:
            command, limit_s = role_command("sft", run_dir / CONFIG_FILE), config.learner.rank_timeout_s
            run_ranks(command, config.cluster.ranks, stop, Timeouts.within(limit_s), activity=activity)
        if config.learner.export:
            log.info("%s is the fine-tuned model", run_dir / "model")


def _watch_requests(run_dir: Path, stop: threading.Event) -> None:
    """Set `stop` once `asyncrl stop` asks for it."""
    requests = StopRequests(run_dir)
    while not stop.wait(LOOK_S):
        if requests.arrived():
            stop.set()


def _settle(config: TrainConfig) -> None:
    """Set the ranks and their threads where the configuration leaves them open: a rank for each GPU, and together all
    CPUs."""
    cluster = config.cluster
    host = this_host(cluster)
    cluster.learner_ranks = cluster.learner_ranks or max(1, host.gpus)
    if cluster.learner_threads is None and "OMP_NUM_THREADS" not in os.environ:
        cluster.learner_threads = max(1, int(host.cpus) // cluster.learner_ranks)


def _run_rank(config: TrainConfig, stop: threading.Event, activity: Activity) -> None:
    process.set_at_once(stop)
    process.limit_threads(config.cluster.learner_threads)
    from asyncrl.commands.sft.rank import run_rank

    run_rank(config, stop, activity)


def _refuse(config: TrainConfig) -> None:
    """Raises ConfigError: what `asyncrl train` can do, and this command cannot."""
    run_dir = locations.run_dir(config.run)
    if config.learner.nodes > 1:
        raise ConfigError(
            f"learner.nodes={config.learner.nodes}: fine-tuning runs on one host; set cluster.learner_ranks to its GPUs"
        )
    if config.data.dataset is not None:
        raise ConfigError(
            f"data.dataset={config.data.dataset}: it makes tasks; data.train names files of demonstrations"
        )
    if config.algorithm.sft.path:
        raise ConfigError("algorithm.sft.path: this is for `asyncrl train`; here data.train names the demonstrations")
    if store_folders(run_dir):
        raise ConfigError(f"{run_dir} holds a run of `asyncrl train`: choose another run.name")


def _prepare(config: TrainConfig, stop: threading.Event) -> None:
    """Check the model, render the demonstrations, and set the steps that their number and the epochs ask for."""
    from asyncrl.episode.from_config import prepare_demonstrations
    from asyncrl.learner.model.optimizer import check_optimizer

    for check in (check_existence, check_tokenizer, check_freezing, check_adapters):
        check(config)
    check_optimizer(config.learner.optimizer)
    shown = prepare_demonstrations(config, config.data.train, stop)
    if config.data.eval:
        prepare_demonstrations(config, config.data.eval, stop)
    learner = config.learner
    if learner.steps is None:
        epoch = -(-len(shown) // learner.batch_size)
        learner.steps, learner.epochs = math.ceil((learner.epochs or 1) * epoch), None


def main() -> None:
    """The entry of the command line."""
    given = sys.argv[1:]
    has_file = any(word.startswith("experiment=") for word in given)
    role_main(run, given if has_file else [*OWN_DEFAULTS, *given])


if __name__ == "__main__":
    main()
