"""The check that the algorithm's parts exist, fit together, and get the scores that they read. It is fast, so a start
and a plan make it first."""

from __future__ import annotations

from asyncrl.config.schema import TrainConfig
from asyncrl.config.schema.scoring import may_give
from asyncrl.errors import ConfigError


def check_algorithm(config: TrainConfig) -> None:
    """Raises ConfigError, with a line for each problem. No part is called."""
    from asyncrl.algorithms.from_config import check, label_needs

    check(
        config.algorithm,
        step_scores=(config.scoring.prm.is_configured and not config.scoring.shadow)
        or config.implicit.train
        or bool(config.actor.interactions),
        group_size=config.learner.group_size,
        demonstrations=config.data.demonstration is not None,
    )
    read = label_needs(config.algorithm).scores
    if unknown := [name for name in read if not may_give(config.scoring, name)]:
        raise ConfigError(
            f"algorithm reads the scores {', '.join(unknown)}, which nothing in scoring gives: every episode would be "
            "a dead letter. Rules give rule/NAME and rule/NAME/NUMBER; docs/scoring.md lists all names"
        )
