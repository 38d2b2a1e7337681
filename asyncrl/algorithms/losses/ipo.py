from __future__ import annotations

import torch

from asyncrl.algorithms.log_ratios import clamp_log
from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates, capped_ratio
from asyncrl.algorithms.parts import param


class Ipo(Loss):
    """The policy gradient within a symmetric trust region: a token whose probability is far from the behaviour policy's
    is dropped, for either sign of its advantage. It is not the preference loss IPO.

    Formula: -A r + pull log^2(pi_theta / mu), without the first term where |pi_theta - mu| > delta; with
    r = min(pi_theta / mu, cap), and the gradient of r equal to r times the gradient of log pi_theta, even beyond the
    cap
    Use: instead of dppo_tv for older data: a token far from the behaviour policy is dropped even if its update would
    move it back
    Source: the loss `ipo` of the library prime-rl, 2026; its first releases had delta=0.1 (eps there) and pull=0.001
    (kl_tau there), later ones have 0.3 and no pull
    Caveat: pi_theta / mu is the whole ratio, so no correction may set weights.
    """

    name = "ipo"
    corrects = True
    reads_proximal = False

    delta: float = param(0.3, "largest |pi_theta - mu| at which the first term counts", "(0, 1)")
    cap: float = param(1e4, "largest ratio that is used as a weight", "[1, inf]")
    pull: float = param(0.0, "strength of the pull back to the behaviour policy", "[0, inf)")

    def __call__(self, updates: Updates) -> TokenLosses:
        policy, behaviour = updates.logprobs, updates.behaviour
        move = policy.detach().exp() - behaviour.exp()
        far = move.abs() > self.delta
        losses = torch.where(far, 0.0, -updates.advantages * capped_ratio(updates, self.cap))
        if self.pull:
            losses = losses + self.pull * clamp_log(policy - behaviour).square()
        return TokenLosses(losses, {"high": far & (move > 0), "low": far & (move < 0)})
