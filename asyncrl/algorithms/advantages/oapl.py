from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.parts import param


class OaplAdvantage(SequenceAdvantage):
    """The advantage over the best policy near the behaviour policy: the reward minus a soft maximum of the group.

    Formula: A = R - beta log(mean of exp(R / beta)), with the mean over the group
    Use: with loss oapl
    Source: LLMs Can Learn to Reason Via Off-Policy RL, 2026, where this baseline estimates the optimal value
    Caveat: the baseline is between the group's mean (a large beta) and its largest reward (a small beta), so the
    advantages of a group do not sum to 0. The estimate assumes that one policy sampled the whole group.
    """

    name = "oapl"
    needs_group = True

    beta: float = param(1.0, "temperature of the baseline, in the unit of the reward", "(0, inf)")

    def scores(self, episodes: Episodes) -> Tensor:
        # Rewards are taken relative to the largest one, and expm1 and log1p are used. So no beta leads to an overflow
        # or to lost digits.
        groups = episodes.groups
        below = episodes.reward.double() - groups.greatest(episodes.reward)
        mean = groups.sum((below / self.beta).expm1()) / groups.size()
        return below - self.beta * mean.log1p()
