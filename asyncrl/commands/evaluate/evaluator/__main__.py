"""`python -m asyncrl.commands.evaluate.evaluator`: replaces the learner in an evaluation, on the CPU.

It publishes the weights of model.path as version 0, and asks the replay to evaluate them. It ends when every attempt is
scored or has failed. After a restart it resumes the same evaluation.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing

import zmq

from asyncrl.commands.evaluate.progress import VERSION
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import StoppedError
from asyncrl.machine import process
from asyncrl.machine.activity import Activity, heartbeat


def run(config: TrainConfig) -> None:
    """Publish the weights, and wait for the evaluation.

    Raises StoppedError: a signal came. Raises ConfigError: the model cannot be loaded, or its log-probs are not finite.
    """
    stop = process.stop_on_signals()
    process.limit_threads(config.cluster.learner_threads)
    from asyncrl.learner.batch.from_config import open_batches
    from asyncrl.learner.checkpoint.gathering import gather, plan_gather
    from asyncrl.learner.from_config import open_publisher, run_settings
    from asyncrl.learner.model.canary import canary_of_model
    from asyncrl.learner.model.loading import read_model
    from asyncrl.learner.ranks.ranks import Ranks
    from asyncrl.modelling.weight_format import WeightFormat
    from asyncrl.weights.manifest import DTYPES

    with ExitStack() as stack:
        stack.enter_context(heartbeat(Activity(), config.cluster.hang_timeout_s))
        alone = Ranks.alone()
        context = stack.enter_context(zmq.Context())
        replay = stack.enter_context(closing(open_batches(config, alone.rank, context, stop)))
        publisher = stack.enter_context(closing(open_publisher(config, alone, context, stop)))
        model = read_model(config.model)
        weights = WeightFormat(model)
        steps = plan_gather(weights, DTYPES[config.model.dtype], config.weights.bucket_mb << 20)
        canary = canary_of_model(model, config.model.path, run_settings(config).canary)
        publisher.publish(VERSION, [step.bucket for step in steps], gather(model, steps, weights, alone), canary)
        replay.published(VERSION)
        replay.evaluate(VERSION)
        while replay.evaluation(VERSION) is None:
            if stop.is_set():
                raise StoppedError("stopped while waiting for the evaluation")


if __name__ == "__main__":
    sys.exit(role_main(run, sys.argv[1:]))
