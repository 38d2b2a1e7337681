from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.parts import param


class Opsm(Correction):
    """Off-policy sequence masking: in sequences that the policy has moved away from, drops the tokens with A < 0.

    Formula: drop a token if A < 0, and the mean of log mu - log pi_theta over its sequence is > delta
    Use: for old data, or several updates per step: samples with A < 0 that are far from the policy make training
    unstable
    Source: DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models, 2025. The paper's pi_old is the
    probability that the inference framework returned, which is mu
    Caveat: it runs in every forward pass, so each update of a step may drop other sequences than the update before.
    """

    name = "opsm"
    follows_policy = True
    by_advantage = True
    uses_ratio = False

    delta: float = param(0.1, "largest mean of log mu - log pi_theta that is kept", "(0, inf)")

    def keep(self, ages: Ages) -> Tensor:
        assert ages.log_policy is not None
        spans = ages.view.sequences
        left = spans.spread(-spans.mean(ages.log_policy) > self.delta)
        return ~(left & (ages.advantages < 0))
