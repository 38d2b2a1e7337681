"""`python -m asyncrl.scoring`: verify and score trajectories until SIGTERM or Ctrl-C, or until the run is done."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from asyncrl.config import locations
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.machine import process
from asyncrl.machine.activity import BEAT_S, Activity, heartbeat
from asyncrl.network.keys import client_keys
from asyncrl.replay.client import ReplayClient

if TYPE_CHECKING:
    from asyncrl.scoring.worker import ScoringWorker


def run(config: TrainConfig) -> None:
    """Score until a signal. Raises ConfigError: a rule or a model cannot be loaded; RunOverError."""
    stop, activity = process.stop_on_signals(), Activity()
    process.limit_threads(config.cluster.scorer_threads)
    with heartbeat(activity, config.cluster.hang_timeout_s), ExitStack() as stack:
        workers = _workers(config, stop, stack)
        process.freeze_heap()
        # Every worker has a thread. When one ends, it ends the others.
        with ThreadPoolExecutor(len(workers), thread_name_prefix="shard") as threads:
            running = [threads.submit(worker.run, stop) for worker in workers]
            activity.enter("score")
            done: set[Future[None]] = set()
            while not done:
                # Workers may wait for the replay. They end by themselves where scoring hangs: scoring.stall_s.
                activity.advance()
                done, _ = wait(running, BEAT_S, FIRST_COMPLETED)
            stop.set()
        for each in done:
            each.result()


def _workers(config: TrainConfig, stop: threading.Event, stack: ExitStack) -> list[ScoringWorker]:
    """One for each shard of the replay, so that an unavailable shard delays only its own trajectories. All share one
    scorer."""
    from asyncrl.config.schema.scoring import GROUP_KIND, serves
    from asyncrl.modelling.tokenizer import open_tokenizer
    from asyncrl.observe.reports import open_reports
    from asyncrl.scoring.managers import Managers
    from asyncrl.scoring.models.registry import load_outcome_model, load_prm
    from asyncrl.scoring.samples import EvaluationSamples
    from asyncrl.scoring.scorer import Scorer
    from asyncrl.scoring.verifier import Verifier
    from asyncrl.scoring.worker import ScoringWorker

    scoring, kinds = config.scoring, serves(config.scoring)
    name, life = process.worker_name("scoring"), process.incarnation()
    tokenizer = open_tokenizer(config.model)
    prm = load_prm(scoring.prm) if "prm" in kinds else None
    outcome = load_outcome_model(scoring.outcome_model) if "outcome_model" in kinds else None
    verifier = stack.enter_context(closing(Verifier(scoring, config.model))) if "rules" in kinds else None
    managers = stack.enter_context(closing(Managers(scoring, config.model))) if GROUP_KIND in kinds else None
    scorer = Scorer(scoring, tokenizer, verifier, prm, outcome, managers)
    workers, keys, run = [], client_keys(config.network), locations.run_identity(config.run)
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


def main() -> None:
    """The entry of the command line."""
    role_main(run)


if __name__ == "__main__":
    main()
