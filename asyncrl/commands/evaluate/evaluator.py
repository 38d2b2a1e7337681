"""`python -m asyncrl.commands.evaluate.evaluator`: takes the learner's place in an evaluation, on the CPU.

It publishes the weights of model.path as version 0, has the replay evaluate them, and ends when every attempt is scored
or failed. A second start goes on with the same evaluation.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing

import zmq

from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import StoppedError
from asyncrl.machine import process
from asyncrl.machine.activity import Activity, heartbeat

VERSION = 0
"""The only policy version of an evaluation."""


def run(config: TrainConfig) -> None:
    """Publish, and wait for the evaluation. Raises StoppedError: a signal came; ConfigError: the model cannot be
    loaded, or its log-probs are not finite."""
    stop = process.stop_on_signals()
    process.limit_threads(config.cluster.learner_threads)
    with heartbeat(Activity(), config.cluster.hang_timeout_s):
        _run(config, stop)


def _run(config: TrainConfig, stop: threading.Event) -> None:
    from asyncrl.learner.batch.from_config import open_batches
    from asyncrl.learner.checkpoint.gathering import gather, plan_gather
    from asyncrl.learner.from_config import canary_settings, open_publisher
    from asyncrl.learner.model.canary import canary_of_model
    from asyncrl.learner.model.loading import read_model
    from asyncrl.learner.ranks.ranks import Ranks
    from asyncrl.modelling.weight_format import WeightFormat
    from asyncrl.weights.manifest import DTYPES

    alone = Ranks.alone()
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        replay = stack.enter_context(closing(open_batches(config, alone.rank, context, stop)))
        publisher = stack.enter_context(closing(open_publisher(config, alone, context, stop)))
        model = read_model(config.model)
        weights = WeightFormat(model)
        steps = plan_gather(weights, DTYPES[config.model.dtype], config.weights.bucket_mb << 20)
        canary = canary_of_model(model, config.model.path, canary_settings(config))
        publisher.publish(VERSION, [step.bucket for step in steps], gather(model, steps, weights, alone), canary)
        replay.published(VERSION)
        replay.evaluate(VERSION)
        while replay.evaluation(VERSION) is None:
            if stop.is_set():
                raise StoppedError("stopped while waiting for the evaluation")


def main() -> None:
    """The entry of the command line."""
    role_main(run)


if __name__ == "__main__":
    main()
