from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from asyncrl.algorithms.divergences import binary_kl
from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates
from asyncrl.algorithms.parts import param


class Dppo(Loss):
    """Base of DppoTv and DppoKl: drops tokens that are far from the behaviour policy and whose update would move them
    further away."""

    delta: float = param(..., "largest distance from the behaviour policy", "(0, inf)")
    delta_low: float | None = param(None, "the bound in place of delta where A <= 0; null: delta", "(0, inf)")
    cap: float = param(20.0, "largest ratio that is used as a weight", "(0, inf]")

    @abstractmethod
    def distance(self, policy: Tensor, behaviour: Tensor) -> Tensor:
        """float[M]: the distance between the probabilities `policy` and `behaviour`, both float[M]."""

    def __call__(self, updates: Updates) -> TokenLosses:
        policy, behaviour = updates.logprobs.detach().exp(), updates.behaviour.exp()
        advantages, distance = updates.advantages, self.distance(policy, behaviour)
        delta_low = self.delta if self.delta_low is None else self.delta_low
        high = (distance > self.delta) & (policy > behaviour) & (advantages > 0)
        low = (distance > delta_low) & (policy < behaviour) & (advantages <= 0)
        weights = updates.ratio().detach().clamp(max=self.cap)
        losses = -weights * advantages * updates.logprobs
        return TokenLosses(torch.where(high | low, 0.0, losses), {"high": high, "low": low})


class DppoTv(Dppo):
    """Divergence proximal policy optimisation: a trust region that limits the total variation between policy and
    behaviour. Only two outcomes are compared: the sampled token, and all other tokens together.

    Formula: -sg(min(r, cap)) A log pi_theta, but 0 where A > 0 and pi_theta - mu > delta, and where A <= 0 and
    pi_theta - mu < -delta_low
    Use: instead of ppo for large vocabularies: a clip of ratios stops rare tokens too early, and frequent ones too late
    Source: Rethinking the Trust Region in LLM Reinforcement Learning, 2026
    Caveat: the region is around the behaviour policy, so old data leave less room.
    """

    name = "dppo_tv"

    delta: float = param(0.15, "largest pi_theta - mu where A > 0", "(0, 1]")

    def distance(self, policy: Tensor, behaviour: Tensor) -> Tensor:
        return (policy - behaviour).abs()


class DppoKl(Dppo):
    """Like dppo_tv, but the trust region limits the KL from behaviour to policy.

    Formula: -sg(min(r, cap)) A log pi_theta, but 0 where A > 0, pi_theta > mu and d > delta, and where A <= 0,
    pi_theta < mu and d > delta_low; with d = mu log(mu / pi_theta) + (1 - mu) log((1 - mu) / (1 - pi_theta))
    Use: as dppo_tv; this distance d is more sensitive for probabilities close to 0 or 1
    Source: Rethinking the Trust Region in LLM Reinforcement Learning, 2026
    Caveat: the region is around the behaviour policy, so old data leave less room.
    """

    name = "dppo_kl"

    delta: float = param(0.05, "largest distance d where A > 0", "(0, inf)")

    def distance(self, policy: Tensor, behaviour: Tensor) -> Tensor:
        return binary_kl(behaviour, policy)
