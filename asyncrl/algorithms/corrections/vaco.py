from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.parts import param


class Vaco(Correction):
    """Drops tokens that would move a sequence further away from the behaviour policy, if it is already far away. Does
    not set weights.

    Formula: drop a token if the mean of |w - 1| over its sequence is > delta, and A log w > 0; with w = pi_prox / mu
    Use: with or without the weights of another correction. Tokens whose update moves the policy back towards the old
    data are kept. With a critic, the paper combines the filter with the advantages of V-trace (advantage vtrace)
    Source: Align and Filter: Improving Performance in Asynchronous On-Policy RL, 2026 (VACO), in the form for language
    models that the library open-instruct had in 2026
    Caveat: the mean of |w - 1| estimates twice the total variation from the sampled tokens alone, so one token with a
    large ratio may decide for a short sequence. With several updates a step, the filter looks at the policy before the
    first update.
    """

    name = "vaco"

    delta: float = param(..., "largest mean of |w - 1| at which all tokens of the sequence are kept", "(0, inf)")

    @property
    def by_token(self) -> bool:
        return True

    def keep(self, ages: Ages) -> Tensor:
        spans = ages.view.sequences
        far = spans.spread(spans.mean(ages.log_w.expm1().abs()) > self.delta)
        return ~(far & (ages.advantages * ages.log_w > 0))
