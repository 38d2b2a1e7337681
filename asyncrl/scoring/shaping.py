"""From scores to the reward that baselines compare: a sum whose parts stay visible by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config.schema import ShapingConfig


@dataclass(frozen=True, slots=True)
class Found:
    """What the pool found out about one episode; None where a kind of scoring was not needed.

    `rules` is the weighted sum of the rules, `outcome` the verdict of the first of them; `environment` is the sum of
    the tools' own rewards, and `length` the episode's policy tokens.
    """

    length: int
    rules: float | None = None
    outcome: float | None = None
    outcome_model: float | None = None
    process: float | None = None
    environment: float = 0.0

    @property
    def accuracy(self) -> float | None:
        """1 for a right answer, 0 for a wrong one: whether the first rule gave more than a half."""
        return None if self.outcome is None else float(self.outcome > 0.5)


@dataclass(frozen=True, slots=True)
class Shaped:
    """The reward, and its parts by name: scores as they were found, bonuses and penalties as they were added."""

    reward: float
    parts: Mapping[str, float]


def shape(found: Found, config: ShapingConfig) -> Shaped:
    """The shaped reward of one episode."""
    scores = {
        "rules": (config.outcome_weight, found.rules),
        "outcome_model": (config.outcome_model_weight, found.outcome_model),
        "process": (config.process_weight, found.process),
        "environment": (config.environment_weight, found.environment),
        "accuracy": (config.prm_acc_bonus_weight, found.accuracy),
    }
    known = {name: (weight, score) for name, (weight, score) in scores.items() if score is not None}
    extras = _bonuses(found, config)
    reward = sum(weight * score for weight, score in known.values()) + sum(extras.values())
    return Shaped(reward, {name: score for name, (_, score) in known.items()} | extras)


def _bonuses(found: Found, config: ShapingConfig) -> dict[str, float]:
    """What is configured to be added, by name; 0 where an episode does not get it."""
    bonuses: dict[str, float] = {}
    if config.overlong_penalty:
        bonuses["overlong"] = config.overlong_penalty * _overlong(found.length, config)
    if found.accuracy is not None and config.length_bonus_weight:
        away = abs(found.length - config.target_response_length) / config.target_response_length
        bonuses["length_bonus"] = config.length_bonus_weight * found.accuracy * max(0.0, 1 - away)
    if found.accuracy is not None and config.enable_anti_hack and config.incorrect_answer_penalty:
        bonuses["incorrect_answer"] = config.incorrect_answer_penalty * (1 - found.accuracy)
    return bonuses


def _overlong(length: int, config: ShapingConfig) -> float:
    """0 up to overlong_max_length - overlong_buffer, then linearly to -1 (DAPO)."""
    room = config.overlong_max_length - config.overlong_buffer - length
    return min(0.0, max(-1.0, room / config.overlong_buffer))
