"""Checks that the algorithm's parts (its loss, its advantages and others) exist, fit together, and get the scores that
they read. The check is fast, so `asyncrl train` runs it before the slow checks, and also runs it with `--plan`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.schema import AlgorithmConfig, DataConfig, ScoringConfig, TrainConfig
from asyncrl.config.schema.scoring import may_give
from asyncrl.config.unread import unread_scores
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.algorithms.composition import Composition

log = logging.getLogger("asyncrl.train")


def check_algorithm(config: TrainConfig) -> None:
    """Check that the parts of the algorithm fit together and fit the run, and warn of scores that change nothing. No
    part is called. Raises ConfigError: the parts do not fit."""
    from asyncrl.algorithms.from_config import check, composition_of
    from asyncrl.tools.environments.classes import may_reward_turns

    parts = composition_of(config.algorithm)
    check(
        config.algorithm,
        step_scores=(config.scoring.step_scorer is not None and not config.scoring.shadow)
        or config.implicit.train
        or (parts.advantage.needs_steps and may_reward_turns(config.actor)),
        group_size=config.learner.group_size,
        demonstrations=config.data.demonstration is not None,
        weighted_samples=config.replay.sampler.kind == "prioritised" and config.replay.sampler.beta > 0,
    )
    read = parts.label_needs.scores
    if unknown := [name for name in read if not may_give(config.scoring, name)]:
        raise ConfigError(
            f"algorithm reads the scores {', '.join(unknown)}, which nothing in scoring gives, so no episode could be "
            "trained. Rules give rule/NAME and rule/NAME/NUMBER; docs/scoring.md lists all names"
            + _why_no_process(config.scoring)
        )
    refused = (
        *_unread_steps(config.scoring, parts),
        *_unread_model(config.scoring, parts),
        *_unused_weight(config.algorithm, config.data),
    )
    if refused:
        raise ConfigError("\n".join(refused))
    compared = config.replay.filter.score
    for name, advice in unread_scores(config.scoring, config.algorithm, compared).items():
        if name != "environment":  # Only an episode shows whether an environment gives rewards.
            log.warning("nothing trains on the score %s, which is only a metric: %s", name, advice)


def _why_no_process(scoring: ScoringConfig) -> str:
    """The end of a refusal, if a step scorer is configured."""
    if scoring.step_scorer is None:
        return ""
    return ". A step scorer gives process, unless scoring.shadow=true or scoring.shaping.prm_aggregation=per_step"


def _unread_steps(scoring: ScoringConfig, parts: Composition) -> Iterator[str]:
    """Yield a refusal of the step scorer if its scores would cost time and change nothing."""
    shaping, scorer = scoring.shaping, scoring.step_scorer
    reads = parts.may_read_steps or "process" in parts.label_needs.scores
    if reads or scoring.shadow or scorer is None:
        return
    if shaping.prm_aggregation == "per_step":
        yield (
            f"scoring.shaping.prm_aggregation=per_step: algorithm.advantage={parts.advantage.name} does not read the "
            f"step scores of {scorer}. Choose an algorithm that reads them, such as algorithm=process_grpo, or set "
            "another prm_aggregation together with scoring.shaping.process_weight"
        )
    elif not shaping.process_weight:
        yield (
            f"{scorer}: nothing reads its step scores. Give them a weight in the reward "
            "(scoring.shaping.process_weight), choose an algorithm that reads steps (algorithm=process_grpo), or only "
            "watch them (scoring.shadow=true)"
        )


def _unread_model(scoring: ScoringConfig, parts: Composition) -> Iterator[str]:
    """Yield a refusal of the outcome model if its scores would change nothing."""
    model = scoring.outcome_model
    reads = scoring.shaping.outcome_model_weight or "outcome_model" in parts.label_needs.scores
    if reads or scoring.shadow or not model.is_configured:
        return
    yield (
        "scoring.outcome_model: nothing reads its scores. Give them a weight in the reward "
        "(scoring.shaping.outcome_model_weight), name `outcome_model` in a part of the algorithm that reads scores "
        "(docs/algorithms.md), or only watch them (scoring.shadow=true)"
    )


def _unused_weight(algorithm: AlgorithmConfig, data: DataConfig) -> Iterator[str]:
    """Yield a refusal of the weight of demonstrations if no task has a demonstration."""
    # config/checks cannot refuse this, since a program with verl's operators may add demonstrations itself.
    weight = algorithm.demonstration.weight
    if weight != "none" and data.demonstration is None:
        yield (
            f"algorithm.demonstration.weight={weight}: no task has a demonstration. Name the column of "
            "demonstrations in data.demonstration, or set the weight to none; demonstrations of algorithm.sft.path "
            "have algorithm.sft.weight"
        )
