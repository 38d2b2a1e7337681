"""Holds the parts of one algorithm (loss, advantage, corrections and so on), and tells which data they need."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl.algorithms.advantages.base import Advantage
from asyncrl.algorithms.aggregation import Aggregation
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.corrections.base import Correction
from asyncrl.algorithms.corrections.zero_variance import ZeroVariance
from asyncrl.algorithms.demonstrations import DemonstrationLoss
from asyncrl.algorithms.kl import Kl
from asyncrl.algorithms.loss_streams import Stream
from asyncrl.algorithms.losses.base import Loss
from asyncrl.algorithms.losses.value import Value
from asyncrl.algorithms.lr_scale import LrScale
from asyncrl.algorithms.rewards.base import Reward
from asyncrl.types import SCORES_OF_ALL, LabelNeeds


@dataclass(frozen=True)
class Composition:
    """The parts of one algorithm. `proximal` is the source of the proximal log-probs (see proximal.py)."""

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
    lr_scale: LrScale

    @property
    def has_kl(self) -> bool:
        return self.kl.name != "none"

    @property
    def needs_reference(self) -> bool:
        return self.has_kl or any(stream.needs_reference for stream in self.streams)

    @property
    def compared(self) -> str:
        """The name of the score by which members of a group are compared. A group whose members all have the same score
        teaches nothing."""
        return next((rule.score for rule in self.corrections if isinstance(rule, ZeroVariance)), "reward")

    def shaped(self, episodes: Episodes) -> Episodes:
        """The episodes after all changes of their rewards."""
        for change in self.rewards:
            episodes = replace(episodes, reward=change(episodes))
        return episodes

    @property
    def label_needs(self) -> LabelNeeds:
        """The requirements for the labels of every trained episode: the scores that parts read, and the range of step
        scores."""
        parts = (*self.rewards, self.advantage, *self.corrections, *self.streams)
        names = {name for part in parts for name in part.reads}
        return LabelNeeds(tuple(sorted(names - {*SCORES_OF_ALL})), self.advantage.needs_unit_steps)

    @property
    def may_read_steps(self) -> bool:
        """True if the advantage reads step scores, or if a user's own part may read them."""
        parts = (*self.rewards, self.advantage, self.loss, *self.corrections, *self.streams)
        own = __name__.partition(".")[0]
        return self.advantage.needs_steps or any(type(part).__module__.partition(".")[0] != own for part in parts)

    @property
    def rule_names(self) -> list[str]:
        """The corrections' names in metrics, in order. A repeated name gets its index in the list: `reject_2` is the
        third correction."""
        names = [rule.name for rule in self.corrections]
        return [name if names.index(name) == k else f"{name}_{k}" for k, name in enumerate(names)]
