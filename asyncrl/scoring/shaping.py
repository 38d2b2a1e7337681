"""From scores to the reward that baselines compare: a weighted sum whose parts stay visible by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import ShapingConfig
from asyncrl.errors import ScoringError

_AGGREGATIONS: Mapping[str, Callable[[NDArray[np.float32]], np.float32]] = {
    "mean": np.mean,
    "min": np.min,
    "product": np.prod,
    "last": lambda scores: scores[-1],
}


@dataclass(frozen=True, slots=True)
class Shaped:
    """The reward, and its parts before weighting: `environment`, and `process` where there are step scores."""

    reward: float
    parts: Mapping[str, float]


def shape(
    outcome: float, step_scores: NDArray[np.float32], rewards: Mapping[str, float], config: ShapingConfig
) -> Shaped:
    """The shaped reward of one episode: step_scores float32[K], rewards of the environment by name.

    Raises ScoringError: step scores count, and there are none.
    """
    parts = {"environment": float(sum(rewards.values()))}
    if len(step_scores):
        parts["process"] = float(_AGGREGATIONS[config.process_aggregation](step_scores))
    elif config.process_weight:
        raise ScoringError("scoring.shaping.process_weight is not 0, but the episode has no scored steps")
    reward = (
        config.outcome_weight * outcome
        + config.process_weight * parts.get("process", 0.0)
        + config.environment_weight * parts["environment"]
    )
    return Shaped(reward, parts)
