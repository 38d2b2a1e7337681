"""`python -m asyncrl.scoring`: verify and score trajectories until SIGTERM or Ctrl-C, or until the run is done.

On SIGUSR2 the process leases nothing more, and scores its leased trajectories for at most cluster.drain_s seconds. Then
it gives unfinished leases back to the replay, and ends.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from asyncrl.config import locations
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.machine import process
from asyncrl.machine.activity import BEAT_S, Activity, heartbeat
from asyncrl.network.keys import client_keys
from asyncrl.replay.client.client import ReplayClient
from asyncrl.replay.client.leaving import leave

if TYPE_CHECKING:
    from asyncrl.scoring.worker import ScoringWorker

log = logging.getLogger(__name__)


def run(config: TrainConfig) -> None:
    """Score until a signal asks to stop.

    Raises ConfigError: a rule or a model cannot be loaded; RunOverError: the run is done.
    """
    stop, drain, activity = process.stop_on_signals(), process.event_on(process.DRAIN), Activity()
    name, life = process.worker_name("scoring"), process.incarnation()
    process.limit_threads(config.cluster.scorer_threads)
    with heartbeat(activity, config.cluster.hang_timeout_s), ExitStack() as stack:
        workers = _workers(config, name, life, stop, stack)
        process.freeze_heap()
        with ThreadPoolExecutor(len(workers), thread_name_prefix="shard") as threads:
            running = [threads.submit(worker.run, stop, drain) for worker in workers]
            activity.enter("score")
            done = _wait(running, activity, stop, drain, config.cluster.drain_s)
            stop.set()
        try:
            for each in done:
                each.result()
        finally:
            if drain.is_set():
                endpoints = locations.replay_endpoints(config.network, config.replay.shards)
                leave(endpoints, name, life, client_keys(config.network.keys), locations.run_identity(config.run))


def _wait(
    running: Collection[Future[None]],
    activity: Activity,
    stop: threading.Event,
    drain: threading.Event,
    limit_s: float,
) -> set[Future[None]]:
    """Wait until one of `running` has ended, and return all that have ended.

    Once `drain` is set, wait until all have ended, for up to `limit_s` seconds.
    """
    until = math.inf
    while True:
        # The process counts as alive even while no worker makes progress. A worker that waits for the replay is not
        # stuck, and a worker whose scoring is stuck ends itself (scoring.stall_s).
        activity.advance()
        when = ALL_COMPLETED if drain.is_set() else FIRST_COMPLETED
        done, rest = wait(running, min(BEAT_S, max(0.0, until - time.monotonic())), when)
        if done and not drain.is_set():
            return done
        if drain.is_set() and math.isinf(until):
            until = time.monotonic() + limit_s
            log.info("waiting up to %g s for the trajectories that are being scored", limit_s)
        if not rest:
            if not stop.is_set() and all(each.exception() is None for each in done):
                log.info("all leased trajectories are scored")
            return done
        if time.monotonic() >= until:
            log.warning("workers still run after cluster.drain_s: what they have not scored, other scorers score")
            return done


def _workers(config: TrainConfig, name: str, life: str, stop: threading.Event, stack: ExitStack) -> list[ScoringWorker]:
    """Make one worker for each shard of the replay, so that an unavailable shard delays only its own trajectories. All
    workers share one scorer."""
    from asyncrl.config.schema.scoring import GROUP_KIND, serves
    from asyncrl.modelling.tokenizer import open_tokenizer
    from asyncrl.observe.from_config import open_reports
    from asyncrl.scoring.managers import Managers
    from asyncrl.scoring.models.registry import load_outcome_model, load_prm
    from asyncrl.scoring.samples import EvaluationSamples
    from asyncrl.scoring.scorer import Scorer
    from asyncrl.scoring.step_rewards import StepRewards
    from asyncrl.scoring.verifier import Steps, Verifier
    from asyncrl.scoring.worker import ScoringWorker

    scoring, kinds = config.scoring, serves(config.scoring)
    tokenizer = open_tokenizer(config.model)
    prm = load_prm(scoring.prm) if "prm" in kinds else None
    outcome = load_outcome_model(scoring.outcome_model) if "outcome_model" in kinds else None
    steps = Steps(config.learner.steps or 0, config.learner.publish_every)
    verifier = (
        stack.enter_context(closing(Verifier(scoring, config.model, config.actor.sandbox, steps)))
        if "rules" in kinds
        else None
    )
    managers = stack.enter_context(closing(Managers(scoring, config.model))) if GROUP_KIND in kinds else None
    step_rewards = stack.enter_context(closing(StepRewards(scoring))) if "steps" in kinds else None
    scorer = Scorer(scoring, tokenizer, verifier, prm, outcome, managers, step_rewards)
    workers, keys, run = [], client_keys(config.network.keys), locations.run_identity(config.run)
    reports = stack.enter_context(open_reports(config, name))
    spans = reports.spans
    endpoints = locations.replay_endpoints(config.network, config.replay.shards)
    for shard, endpoint in enumerate(endpoints):
        client = stack.enter_context(closing(ReplayClient(endpoint, name, life, stop, keys=keys, run=run, spans=spans)))
        metrics = reports.metrics(name if len(endpoints) == 1 else f"{name}-shard-{shard}")
        samples = EvaluationSamples(scoring.eval_samples, tokenizer)
        worker = ScoringWorker(client, scorer, scoring, metrics, config.replay.lease_s, samples=samples, spans=spans)
        workers.append(worker)
    return workers


def main(argv: Sequence[str]) -> int:
    """Run this role with the command-line arguments `argv`, and return the exit status."""
    return role_main(run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
