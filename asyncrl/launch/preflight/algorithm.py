"""The check that the algorithm's parts exist, go together, and get from the run what they read. A start and a plan make
it before all that is slow."""

from __future__ import annotations

from asyncrl.config.schema import TrainConfig


def check_algorithm(config: TrainConfig) -> None:
    """Raises ConfigError, with a line for each problem. No part is called."""
    from asyncrl.algorithms.composition import check

    check(
        config.algorithm,
        step_scores=(config.scoring.prm.is_configured and not config.scoring.shadow)
        or config.implicit.train
        or bool(config.actor.interactions),
        group_size=config.learner.group_size,
        demonstrations=config.data.demonstration is not None,
    )
