"""Checks that the algorithm's parts exist, fit together, and get the scores that they read. The check is fast, so
`asyncrl train` makes it first, with `--plan` too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.schema import ScoringConfig, TrainConfig
from asyncrl.config.schema.scoring import may_give
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.algorithms.composition import Composition


def check_algorithm(config: TrainConfig) -> None:
    """Raises ConfigError, with a line for each problem. No part is called."""
    from asyncrl.algorithms.from_config import check, composition_of

    check(
        config.algorithm,
        step_scores=(config.scoring.prm.is_configured and not config.scoring.shadow)
        or config.implicit.train
        or bool(config.actor.interactions),
        group_size=config.learner.group_size,
        demonstrations=config.data.demonstration is not None,
    )
    parts = composition_of(config.algorithm)
    read = parts.label_needs.scores
    if unknown := [name for name in read if not may_give(config.scoring, name)]:
        raise ConfigError(
            f"algorithm reads the scores {', '.join(unknown)}, which nothing in scoring gives: every episode would be "
            "a dead letter. Rules give rule/NAME and rule/NAME/NUMBER; docs/scoring.md lists all names"
        )
    if unread := "\n".join(_unread_steps(config.scoring, parts)):
        raise ConfigError(unread)


def _unread_steps(scoring: ScoringConfig, parts: Composition) -> Iterator[str]:
    """The refusal of step scores that would cost time and change nothing."""
    shaping, reads = scoring.shaping, parts.may_read_steps or "process" in parts.label_needs.scores
    if reads or scoring.shadow or not scoring.prm.is_configured:
        return
    model = f"scoring.prm.family={scoring.prm.family}" if scoring.prm.path is None else "scoring.prm.path"
    if shaping.prm_aggregation == "per_step":
        yield (
            f"scoring.shaping.prm_aggregation=per_step: algorithm.advantage={parts.advantage.name} does not read the "
            f"steps that {model} scores: choose an algorithm that does, such as algorithm=process_grpo, or another "
            "prm_aggregation and a scoring.shaping.process_weight"
        )
    elif not shaping.process_weight:
        yield (
            f"{model}: nothing reads its step scores. Give them a weight in the reward "
            "(scoring.shaping.process_weight), choose an algorithm that reads steps (algorithm=process_grpo), or only "
            "watch them (scoring.shadow=true)"
        )
