"""`python -m asyncrl.scoring`: verify and score trajectories until SIGTERM or Ctrl-C."""

from __future__ import annotations

from asyncrl import process
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.replay.client import ReplayClient


def run(config: TrainConfig) -> None:
    """Score until a signal. Raises ConfigError: a rule or a model cannot be loaded."""
    stop = process.stop_on_signals()
    process.limit_threads(config.cluster.scorer_threads)
    from transformers import AutoTokenizer

    from asyncrl.observe.sinks import open_metrics
    from asyncrl.scoring.models.registry import load_outcome_model, load_prm
    from asyncrl.scoring.needs import serves
    from asyncrl.scoring.scorer import Scorer
    from asyncrl.scoring.verifier import Verifier
    from asyncrl.scoring.worker import Worker

    scoring, name, kinds = config.scoring, process.worker_name("scoring"), serves(config.scoring)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    prm = load_prm(scoring.prm, "scoring.prm") if "prm" in kinds else None
    outcome_model = (
        load_outcome_model(scoring.outcome_model, "scoring.outcome_model") if "outcome_model" in kinds else None
    )
    verifier = Verifier(scoring, config.model) if "rules" in kinds else None
    client = ReplayClient(process.replay_endpoint(config.network), name, process.incarnation(), stop)
    metrics = open_metrics(config.observe, process.run_dir(config.run), name)
    scorer = Scorer(scoring, tokenizer, verifier, prm, outcome_model)
    worker = Worker(client, scorer, scoring, metrics, config.replay.lease_s)
    try:
        worker.run(stop)
    finally:
        if verifier is not None:
            verifier.close()
        client.close()
        metrics.close()


def main() -> None:
    """The entry of the command line."""
    role_main(run)


if __name__ == "__main__":
    main()
