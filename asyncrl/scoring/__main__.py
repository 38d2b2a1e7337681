"""`python -m asyncrl.scoring`: verify and score trajectories until SIGTERM or Ctrl-C."""

from __future__ import annotations

from asyncrl import process
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.replay.client import ReplayClient


def run(config: TrainConfig) -> None:
    """Score until a signal. Raises ConfigError: a rule or the process reward model cannot be loaded."""
    stop = process.stop_on_signals()
    process.limit_threads(config.cluster.scorer_threads)
    from transformers import AutoTokenizer

    from asyncrl.observe.sinks import open_metrics
    from asyncrl.scoring.models.registry import load_prm
    from asyncrl.scoring.scorer import Scorer
    from asyncrl.scoring.verifier import Verifier
    from asyncrl.scoring.worker import Worker

    scoring, name = config.scoring, process.worker_name("scoring")
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    prm = load_prm(scoring.prm, "scoring.prm") if scoring.prm.path else None
    verifier = Verifier(scoring.rule, scoring.rules, scoring.timeout_s)
    client = ReplayClient(process.replay_endpoint(config.network), name, process.incarnation(), stop)
    metrics = open_metrics(config.observe, process.run_dir(config.run), name)
    worker = Worker(client, Scorer(scoring, tokenizer, verifier, prm), scoring, metrics, config.replay.lease_s)
    try:
        worker.run(stop)
    finally:
        verifier.close()
        client.close()
        metrics.close()


def main() -> None:
    """The entry of the command line."""
    role_main(run)


if __name__ == "__main__":
    main()
