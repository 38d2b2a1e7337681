from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.global_threshold import order, threshold
from asyncrl.algorithms.parts import param


class M2po(Correction):
    """Second-moment trust policy optimisation: drops the tokens with the most extreme log-ratios until the second
    moment is small.

    Formula: drop the tokens of the global batch with the largest (log w)^2, until the mean of the others is < tau; with
    w = pi_prox / mu
    Use: for very old data, of which a clip would drop too much
    Source: Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?, 2025
    Caveat: tokens with equal (log w)^2 are dropped or kept together. The threshold is computed once per step, before
    the updates.
    """

    name = "m2po"
    whole_batch = True

    tau: float = param(0.04, "bound on the mean of (log w)^2", "(0, inf)")

    @property
    def by_token(self) -> bool:
        return True

    def keep(self, ages: Ages) -> Tensor:
        assert ages.reduce is not None
        moments = ages.log_w.square()
        cut = threshold(moments, lambda count, total: total >= self.tau * count, ages.reduce)
        return order(moments) < cut
