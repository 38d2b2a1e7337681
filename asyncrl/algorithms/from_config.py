"""Builds the parts that the section `algorithm` of the configuration names, and checks their combination."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from asyncrl.algorithms import registry
from asyncrl.algorithms.composition import Composition
from asyncrl.algorithms.conflicts import conflicts, missing_data, sampler_conflicts
from asyncrl.algorithms.demonstrations import DemonstrationLoss
from asyncrl.algorithms.proximal import source_of
from asyncrl.config.schema import AlgorithmConfig, PartConfig
from asyncrl.errors import ConfigError
from asyncrl.types import LabelNeeds


def composition_of(config: AlgorithmConfig, updates: int = 1) -> Composition:
    """The parts for a learner that updates the policy `updates` times per step.

    Raises ConfigError: a name or parameter is wrong, or the parts cannot be combined.
    """
    wrong: list[str] = []

    def build(kind: str, choice: PartConfig, key: str = "") -> Any:
        try:
            return registry.build(kind, choice.name, choice.params)
        except ConfigError as error:
            # A part knows its kind, but not the key that names it.
            wrong.append(str(error).replace(f"algorithm.{kind}", f"algorithm.{key or kind}", 1))

    parts = Composition(
        rewards=tuple(build("reward", choice) for choice in config.reward),
        advantage=build("advantage", config.advantage),
        loss=build("loss", config.loss),
        corrections=tuple(build("correction", choice) for choice in config.correction),
        proximal=config.proximal,
        streams=tuple(build("stream", choice) for choice in config.stream),
        kl=build("kl", config.kl),
        aggregation=build("aggregation", config.aggregation),
        value=build("value", config.value),
        value_aggregation=build("aggregation", config.value_aggregation, "value_aggregation"),
        entropy_weight=config.entropy_weight,
        demonstration=DemonstrationLoss.of(config.demonstration),
        lr_scale=build("lr_scale", config.lr_scale),
    )
    _refuse(wrong)
    _refuse(conflicts(parts, greedy_sibling=config.greedy_sibling))
    return replace(parts, proximal=source_of(parts, updates))


def label_needs(config: AlgorithmConfig) -> LabelNeeds:
    """The scores that the labels of every trained episode must have."""
    return composition_of(config).label_needs


def check(
    config: AlgorithmConfig,
    *,
    step_scores: bool,
    group_size: int,
    demonstrations: bool = False,
    weighted_samples: bool = False,
) -> None:
    """Check that the algorithm fits the run: whether steps are scored, how large groups are, whether they contain
    demonstrations, and whether the sampler gives groups importance weights.

    Raises ConfigError: the parts cannot be combined, or do not fit the data of the run.
    """
    parts = composition_of(config)
    missing = missing_data(
        parts.advantage, step_scores=step_scores, group_size=group_size, demonstrations=demonstrations
    )
    _refuse([*missing, *(sampler_conflicts(parts.loss) if weighted_samples else ())])


def _refuse(reasons: Iterable[str]) -> None:
    if text := "\n".join(reasons):
        raise ConfigError(text)
