"""The parts of one algorithm, and which of them go together. Each refusal names the key, its value and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from asyncrl.algorithms import registry
from asyncrl.algorithms.advantages.base import Advantage
from asyncrl.algorithms.aggregation import Aggregation
from asyncrl.algorithms.corrections.base import Correction
from asyncrl.algorithms.kl import Kl
from asyncrl.algorithms.losses.base import Loss
from asyncrl.algorithms.losses.value import Value
from asyncrl.algorithms.parts import Part
from asyncrl.algorithms.rewards.base import Reward
from asyncrl.config.schema import AlgorithmConfig, PartConfig
from asyncrl.errors import ConfigError


@dataclass(frozen=True)
class Composition:
    """Parts that go together."""

    rewards: tuple[Reward, ...]
    advantage: Advantage
    loss: Loss
    corrections: tuple[Correction, ...]
    proximal: str
    kl: Kl
    aggregation: Aggregation
    value: Value
    entropy_weight: float

    @classmethod
    def of(cls, config: AlgorithmConfig) -> Composition:
        """The parts that the config names. Raises ConfigError."""
        parts = cls(
            rewards=tuple(cast(Reward, _build("reward", choice)) for choice in config.reward),
            advantage=cast(Advantage, _build("advantage", config.advantage)),
            loss=cast(Loss, _build("loss", config.loss)),
            corrections=tuple(cast(Correction, _build("correction", choice)) for choice in config.correction),
            proximal=config.proximal,
            kl=cast(Kl, _build("kl", config.kl)),
            aggregation=cast(Aggregation, _build("aggregation", config.aggregation)),
            value=cast(Value, _build("value", config.value)),
            entropy_weight=config.entropy_weight,
        )
        _refuse(parts.conflicts(config.greedy_sibling))
        return parts

    def conflicts(self, greedy: bool) -> list[str]:
        """What does not go together, in words; empty where all does."""
        return [*self._weight_conflicts(), *self._proximal_conflicts(), *self._sequence_conflicts(greedy)]

    @property
    def has_kl(self) -> bool:
        return self.kl.name != "none"

    @property
    def rule_names(self) -> list[str]:
        """The corrections' names in metrics, in order; a second one of a name is numbered."""
        names = [rule.name for rule in self.corrections]
        return [name if names.index(name) == k else f"{name}_{k}" for k, name in enumerate(names)]

    def is_live(self, rule: Correction) -> bool:
        """Whether the rule is applied in every forward pass, not once before the updates."""
        return rule.follows_policy or (self.proximal == "interpolate" and rule.uses_ratio)

    def _weight_conflicts(self) -> list[str]:
        weighing = [rule.name for rule in self.corrections if rule.weighs]
        setting = f"algorithm.correction has {', '.join(weighing)}, which weigh tokens by pi_prox / mu"
        found = []
        if len(weighing) > 1:
            found.append(f"{setting}: only one may; use reject or veto for further bounds")
        if weighing and self.loss.corrects:
            found.append(f"{setting}, and algorithm.loss={self.loss.name} does so itself: set algorithm.correction=[]")
        if weighing and self.advantage.uses_ratio:
            found.append(
                f"{setting}, and algorithm.advantage={self.advantage.name} does so itself: set algorithm.correction=[]"
            )
        names = [rule.name for rule in self.corrections]
        if "normalise" in names and not any(rule.weighs for rule in self.corrections[: names.index("normalise")]):
            found.append("algorithm.correction normalise has no weights to normalise: put truncate or mask before it")
        return found

    def _proximal_conflicts(self) -> list[str]:
        setting = f"algorithm.proximal={self.proximal}"
        by_ratio = [rule for rule in self.corrections if rule.uses_ratio]
        if self.proximal == "behaviour" and (by_ratio or self.advantage.uses_ratio):
            names = [rule.name for rule in by_ratio] or [self.advantage.name]
            return [
                f"{setting}: pi_prox / mu is 1 everywhere, so {', '.join(names)} would do nothing: set "
                "algorithm.proximal=recompute, or algorithm.correction=[]"
            ]
        early = [rule.name for rule in by_ratio if rule.whole_batch]
        early += [self.advantage.name] if self.advantage.uses_ratio else []
        early += [self.loss.name] if self.loss.selects else []
        early += [self.kl.name] if self.has_kl and (self.kl.place == "reward" or self.kl.target) else []
        if self.proximal == "interpolate" and early:
            needed = f"is known only in the forward pass, and {', '.join(early)} needs it before: use recompute"
            return [f"{setting} {needed}"]
        return []

    def _sequence_conflicts(self, greedy: bool) -> list[str]:
        found = []
        by_token = [rule.name for rule in self.corrections if rule.by_token]
        if self.loss.sequence_level and by_token:
            found.append(
                f"algorithm.loss={self.loss.name} has one ratio a sequence, and algorithm.correction "
                f"{', '.join(by_token)} treats its tokens differently: set level=sequence or level=geometric "
                "(reject: over=sequence_mean)"
            )
        if self.advantage.needs_greedy and not greedy:
            found.append(
                f"algorithm.advantage={self.advantage.name} needs a greedily sampled member in every group: set "
                "algorithm.greedy_sibling=true"
            )
        if self.has_kl and self.kl.place == "reward" and not self.advantage.uses_reward:
            found.append(
                f"algorithm.kl place=reward: algorithm.advantage={self.advantage.name} does not read the reward; set "
                "place=loss"
            )
        return found


def check(config: AlgorithmConfig, *, step_scores: bool, group_size: int) -> None:
    """Raises ConfigError: the parts do not go together, or need step scores (a process model) or larger groups than the
    run has."""
    parts = Composition.of(config)
    advantage = parts.advantage
    found = []
    if advantage.needs_steps and not step_scores:
        found.append(
            f"algorithm.advantage={advantage.name} needs step scores: set scoring.prm.path to a process reward model"
            + (", or implicit.train=true" if advantage.name == "prime" else "")
        )
    if group_size == 1 and advantage.needs_group:
        found.append(
            f"algorithm.advantage={advantage.name} compares the members of a group: set learner.group_size above 1"
        )
    _refuse(found)


def _build(kind: str, choice: PartConfig) -> Part:
    return registry.build(kind, choice.name, choice.params)


def _refuse(found: Sequence[str]) -> None:
    if found:
        raise ConfigError("\n".join(found))
