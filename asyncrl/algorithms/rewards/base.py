"""The base class of changes of the reward."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.parts import Part


class Reward(Part):
    """Base of the reward changes, which are applied in the order of the configuration."""

    kind = "reward"

    @abstractmethod
    def __call__(self, episodes: Episodes) -> Tensor:
        """float[S]: the rewards that replace `episodes.reward`."""
