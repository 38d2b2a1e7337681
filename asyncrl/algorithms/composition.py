"""The parts of one algorithm, and which of them go together. Each refusal names the key, its value and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.algorithms import registry
from asyncrl.algorithms.advantages.base import Advantage
from asyncrl.algorithms.aggregation import Aggregation
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.corrections.base import Correction
from asyncrl.algorithms.corrections.zero_variance import ZeroVariance
from asyncrl.algorithms.demonstrations import DemonstrationLoss
from asyncrl.algorithms.kl import Kl
from asyncrl.algorithms.losses.base import Loss
from asyncrl.algorithms.losses.value import Value
from asyncrl.algorithms.rewards.base import Reward
from asyncrl.algorithms.streams import LossStream, Stream
from asyncrl.config.schema import AlgorithmConfig, PartConfig
from asyncrl.errors import ConfigError
from asyncrl.types import SCORES_OF_ALL, LabelNeeds

INTERPOLATED = ("interpolate", "interpolate_linear")


@dataclass(frozen=True)
class Composition:
    """Parts that go together. `proximal` is training where the training forward gives the proximal log-probs, too, or
    nothing but the metrics reads them."""

    rewards: tuple[Reward, ...]
    advantage: Advantage
    loss: Loss
    corrections: tuple[Correction, ...]
    proximal: str
    streams: tuple[Stream, ...]
    kl: Kl
    aggregation: Aggregation
    value: Value
    value_aggregation: Aggregation
    entropy_weight: float
    demonstration: DemonstrationLoss

    @classmethod
    def of(cls, config: AlgorithmConfig, updates: int = 1) -> Composition:
        """The parts that the config names, for a learner with so many updates a step. Raises ConfigError."""
        wrong: list[str] = []

        def build(kind: str, choice: PartConfig) -> Any:
            try:
                return registry.build(kind, choice.name, choice.params)
            except ConfigError as error:
                wrong.append(str(error))

        parts = cls(
            rewards=tuple(build("reward", choice) for choice in config.reward),
            advantage=build("advantage", config.advantage),
            loss=build("loss", config.loss),
            corrections=tuple(build("correction", choice) for choice in config.correction),
            proximal=config.proximal,
            streams=tuple(build("stream", choice) for choice in config.stream),
            kl=build("kl", config.kl),
            aggregation=build("aggregation", config.aggregation),
            value=build("value", config.value),
            value_aggregation=build("aggregation", config.value_aggregation),
            entropy_weight=config.entropy_weight,
            demonstration=DemonstrationLoss.of(config.demonstration),
        )
        _refuse(wrong)
        conflicts = (
            _weight_conflicts(parts),
            _proximal_conflicts(parts),
            _other_conflicts(parts, config),
            _stream_conflicts(parts),
        )
        _refuse(text for found in conflicts for text in found)
        if parts.proximal == "auto":
            in_time = (updates == 1 or not _reads_proximal(parts)) and not _early(parts)
            parts = replace(parts, proximal="training" if in_time else "recompute")
        return parts

    @property
    def has_kl(self) -> bool:
        return self.kl.name != "none"

    @property
    def needs_reference(self) -> bool:
        return self.has_kl or any(stream.needs_reference for stream in self.streams)

    @property
    def compared(self) -> str:
        """The score whose equality in a group says that the group teaches nothing."""
        return next((rule.score for rule in self.corrections if isinstance(rule, ZeroVariance)), "reward")

    def shaped(self, episodes: Episodes) -> Episodes:
        """The episodes with the rewards that the parts make of those of the labels."""
        for change in self.rewards:
            episodes = replace(episodes, reward=change(episodes))
        return episodes

    @property
    def label_needs(self) -> LabelNeeds:
        """What must be in the labels of every episode that is trained."""
        parts = (*self.rewards, self.advantage, *self.corrections, *self.streams)
        names = {name for part in parts for name in part.reads}
        return LabelNeeds(tuple(sorted(names - {*SCORES_OF_ALL})), self.advantage.needs_unit_steps)

    @property
    def rule_names(self) -> list[str]:
        """The corrections' names in metrics, in order; a second one of a name is numbered."""
        names = [rule.name for rule in self.corrections]
        return [name if names.index(name) == k else f"{name}_{k}" for k, name in enumerate(names)]

    def is_live(self, rule: Correction) -> bool:
        """Whether the rule is applied in every forward pass, not once before the updates."""
        return rule.follows_policy or (self.proximal in (*INTERPOLATED, "training") and rule.uses_ratio)


def _weight_conflicts(parts: Composition) -> Iterator[str]:
    weighing = [rule.name for rule in parts.corrections if rule.weighs]
    setting = f"algorithm.correction has {', '.join(weighing)}, which weigh tokens by pi_prox / mu"
    if len(weighing) > 1:
        yield f"{setting}: only one may; use reject or veto for further bounds"
    for part, corrects in ((parts.loss, parts.loss.corrects), (parts.advantage, parts.advantage.uses_ratio)):
        if weighing and corrects:
            yield f"{setting}, and algorithm.{part.kind}={part.name} does so itself: set algorithm.correction=[]"
    names = [rule.name for rule in parts.corrections]
    if "normalise" in names and not any(rule.weighs for rule in parts.corrections[: names.index("normalise")]):
        yield "algorithm.correction normalise has no weights to normalise: put truncate or mask before it"


def _proximal_conflicts(parts: Composition) -> Iterator[str]:
    setting, advantage = f"algorithm.proximal={parts.proximal}", parts.advantage
    by_ratio = [rule for rule in parts.corrections if rule.uses_ratio]
    if parts.proximal == "behaviour" and (by_ratio or advantage.uses_ratio):
        names = [rule.name for rule in by_ratio] or [advantage.name]
        yield (
            f"{setting}: pi_prox / mu is 1 everywhere, so {', '.join(names)} would do nothing: set "
            "algorithm.proximal=recompute, or algorithm.correction=[]"
        )
    if parts.proximal == "behaviour" and advantage.needs_collisions:
        yield (
            f"{setting}: algorithm.advantage={advantage.name} needs the whole distributions of the proximal policy: "
            "set algorithm.proximal=recompute"
        )
    if parts.proximal in INTERPOLATED and (early := _early(parts)):
        yield f"{setting} is known only in the forward pass, and {', '.join(early)} needs it before: use recompute"


def _early(parts: Composition) -> list[str]:
    """The names of the parts that need the proximal log-probs of the whole batch before the updates."""
    early = [rule.name for rule in parts.corrections if rule.uses_ratio and rule.whole_batch]
    early += [parts.advantage.name] if parts.advantage.uses_ratio or parts.advantage.needs_collisions else []
    early += [parts.loss.name] if parts.loss.selects else []
    early += [parts.kl.name] if parts.has_kl and (parts.kl.place == "reward" or parts.kl.target) else []
    return early


def _reads_proximal(parts: Composition) -> bool:
    """Whether a part reads the proximal log-probs during the updates."""
    return (
        parts.loss.reads_proximal
        or any(stream.reads_proximal for stream in parts.streams if isinstance(stream, LossStream))
        or any(rule.uses_ratio for rule in parts.corrections)
    )


def _other_conflicts(parts: Composition, config: AlgorithmConfig) -> Iterator[str]:
    by_token = [rule.name for rule in parts.corrections if rule.by_token]
    if parts.loss.sequence_level and by_token:
        yield (
            f"algorithm.loss={parts.loss.name} has one ratio a sequence, and algorithm.correction "
            f"{', '.join(by_token)} treats its tokens differently: set level=sequence or level=geometric "
            "(reject: over=sequence_mean)"
        )
    advantage = f"algorithm.advantage={parts.advantage.name}"
    if parts.advantage.needs_greedy and not config.greedy_sibling:
        yield f"{advantage} needs a greedily sampled member in every group: set algorithm.greedy_sibling=true"
    if parts.has_kl and parts.kl.place == "reward" and not parts.advantage.uses_reward:
        yield f"algorithm.kl place=reward: {advantage} does not read the reward; set place=loss"
    if parts.kl.importance_weighted and parts.kl.place == "reward":
        yield "algorithm.kl importance_weighted=true is a form of the loss: set place=loss"


def _stream_conflicts(parts: Composition) -> Iterator[str]:
    names = [stream.name for stream in parts.streams]
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield f"algorithm.stream has {twice} twice: give each stream once"
    for stream in parts.streams:
        if isinstance(stream, LossStream) == (stream.name == "rl") or stream.name in ("policy", "kl", "entropy"):
            yield (
                f"algorithm.stream={stream.name}: derive a stream of yours from LossStream, and name it other than rl, "
                "policy, kl and entropy"
            )
    rl = next((stream for stream in parts.streams if stream.name == "rl"), None)
    others = [stream for stream in parts.streams if isinstance(stream, LossStream) and stream.weight]
    if rl is not None and not rl.weight and not others:
        yield "algorithm.stream rl has weight=0, and nothing else trains: add ce or ref_kl with a weight"


def label_needs(config: AlgorithmConfig) -> LabelNeeds:
    """What must be in the labels of every episode that the algorithm trains."""
    return Composition.of(config).label_needs


def check(config: AlgorithmConfig, *, step_scores: bool, group_size: int, demonstrations: bool = False) -> None:
    """Raises ConfigError: the parts do not go together, or need step scores (a process model) or larger groups than the
    run has, or cannot have demonstrations in groups."""
    _refuse(_missing(Composition.of(config).advantage, step_scores, group_size, demonstrations))


def _missing(advantage: Advantage, step_scores: bool, group_size: int, demonstrations: bool) -> Iterator[str]:
    setting = f"algorithm.advantage={advantage.name}"
    of_policy = advantage.needs_critic or advantage.uses_ratio or advantage.needs_collisions
    if demonstrations and of_policy:
        yield (
            f"{setting} values what the policy samples token by token, and a demonstration is not sampled: set "
            "data.demonstration=null, or algorithm.advantage to one that compares whole episodes, such as grpo"
        )
    if advantage.needs_steps and not step_scores:
        implicit = ", or implicit.train=true" if advantage.name == "prime" else ""
        yield (
            f"{setting} needs step scores: set scoring.prm.path to a process reward model{implicit}, or "
            "actor.interactions to simulated users that score turns"
        )
    if group_size == 1 and advantage.needs_group:
        yield f"{setting} compares the members of a group: set learner.group_size above 1"


def _refuse(conflicts: Iterable[str]) -> None:
    if text := "\n".join(conflicts):
        raise ConfigError(text)
