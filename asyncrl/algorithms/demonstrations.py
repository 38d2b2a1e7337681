"""Demonstrations as members of groups: their rewards count in the baselines, and their tokens get advantages like the
tokens of all other members.

No policy sampled the tokens of a demonstration, so they have no behaviour policy and no ratio. Clipping, corrections,
the KL, the entropy bonus and the metrics of ratios and ages leave these tokens out.

The loss of demonstrations is the policy gradient with a special importance weight (`DemonstrationLoss`). It is divided
by the same counts as the loss of all other tokens, and added to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Tokens
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.config.schema import DemonstrationConfig


@dataclass(frozen=True, slots=True)
class DemonstrationLoss:
    """The loss of a demonstration's tokens, with the advantage A and the policy's probability p. sg stops the gradient.

    Formula: -A p / sg(p); with shaped=true, -A p / (p + gamma), whose gradient is -A w grad log p with w = gamma p / (p
    + gamma)^2
    Source: Learning to Reason under Off-Policy Guidance, 2025 (policy shaping, with 1 for the probability of each token
    under the demonstrator)
    """

    shaped: bool
    gamma: float

    @classmethod
    def of(cls, config: DemonstrationConfig) -> DemonstrationLoss:
        return cls(config.weight == "shaped", config.gamma)

    def __call__(self, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """float[M]: each token's loss, from `logprobs` float[M] (log p, with gradient) and `advantages` float[M]."""
        if not self.shaped:
            return -advantages * (logprobs - logprobs.detach()).exp()
        return -advantages * self._share(logprobs)

    def weights(self, logprobs: Tensor) -> Tensor:
        """float[M]: the factor, without the advantage, by which the loss multiplies the gradient of each token's
        log-prob."""
        share = self._share(logprobs)
        return share * (1 - share) if self.shaped else torch.ones_like(logprobs)

    def _share(self, logprobs: Tensor) -> Tensor:
        """float[M]: p / (p + gamma), which stays exact even if p itself would underflow."""
        return torch.sigmoid(logprobs - math.log(self.gamma))


def of_demonstrations(tokens: Tokens) -> PolicyTokens | None:
    """The policy tokens of demonstrations. `None` if there are no demonstrations."""
    if tokens.demonstrated is None:
        return None
    view = PolicyTokens.of(tokens)
    return view.narrow(view.take(tokens.demonstrated))


def only_sampled(tokens: Tokens) -> Tokens:
    """The tokens, with a `view` that selects only the sampled tokens. In this view, demonstrations are empty
    sequences."""
    if tokens.demonstrated is None:
        return tokens
    view = PolicyTokens.of(tokens)
    return replace(tokens, view=view.narrow(~view.take(tokens.demonstrated)))
