from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.divergences import binary_kl
from asyncrl.algorithms.parts import param


class Kpop(Correction):
    """Masked importance sampling (KPop): importance weights for tokens whose binary KL is small in both directions. All
    other tokens are dropped.

    Formula: w = pi_prox / mu where max(D(pi_prox, mu), D(mu, pi_prox)) <= phi, else the token is dropped; with
    D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q))
    Use: instead of mask: the bounds of the ratio are wide for a rare token and narrow for a likely one
    Source: Taming Training-Inference Mismatch in Reinforcement Learning with Adaptive Masking Regions, 2026 (KPop); the
    weights are those of the library AReaL, 2026 (rejection_sampling.metric=binary_kl)
    Caveat: weights have no cap, and a rare token may have a large ratio although its binary KL is at most phi. KPop's
    authors use phi=0.1, and AReaL's example has 2.0, which drops almost nothing.
    """

    name = "kpop"
    weighs = True

    phi: float = param(0.1, "largest binary KL that is kept, in either direction", "(0, inf)")

    @property
    def by_token(self) -> bool:
        return True

    def weigh(self, ages: Ages) -> Tensor:
        return ages.log_w.exp()

    def keep(self, ages: Ages) -> Tensor:
        assert ages.behaviour is not None
        assert ages.proximal is not None
        proximal, behaviour = ages.proximal.exp(), ages.behaviour.exp()
        return torch.maximum(binary_kl(proximal, behaviour), binary_kl(behaviour, proximal)) <= self.phi
