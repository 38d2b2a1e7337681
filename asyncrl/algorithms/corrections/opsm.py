"""Off-policy sequence masking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.parts import param


@dataclass(frozen=True, kw_only=True)
class Opsm(Correction):
    """Drops bad sequences that the policy has already left behind.

    Formula: drop the tokens with A < 0 of a sequence whose mean(log pi_old - log pi_theta) > delta
    Use: several updates a step, or old data: negative samples far from the policy only destabilise it
    Source: DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models, 2025
    Caveat: applied again in every forward pass, so which sequences are dropped depends on the update.
    """

    name: ClassVar[str] = "opsm"
    follows_policy: ClassVar[bool] = True
    uses_ratio: ClassVar[bool] = False

    delta: float = param(0.1, "largest mean log-ratio that is kept", "(0, inf)")

    def keep(self, ages: Ages) -> Tensor:
        assert ages.log_update is not None
        spans = ages.view.sequences
        left = spans.spread(-spans.mean(ages.log_update) > self.delta)
        return ~(left & (ages.advantages < 0))
