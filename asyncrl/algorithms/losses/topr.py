from __future__ import annotations

import torch

from asyncrl.algorithms.losses.base import FADED, Loss, TokenLosses, Updates, log_behaviour_ratio
from asyncrl.algorithms.parts import param


class Topr(Loss):
    """Tapered off-policy REINFORCE: a good sequence keeps its whole advantage, however old it is. The weight of a bad
    sequence falls with its probability, so that its probability does not fall without end.

    Formula: -A log pi_theta where A >= 0, else -sg(min(W, cap)) A log pi_theta; with W = pi_theta / mu of the sequence,
    a product or a geometric mean (see `level`)
    Use: for old data and rewards of whole episodes, without a proximal policy and without a KL
    Source: Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs, 2025 (eq. 8, with
    level=sequence and cap=1)
    Caveat: with level=sequence, the weight of a long bad sequence is nearly 0 as soon as its tokens are a little less
    likely; level=geometric is the form that was proposed for verl. In the paper, A is a reward of 1 or -1, without a
    baseline. Corrections must not set weights or treat tokens of a sequence differently.
    """

    name = "topr"
    sequence_level = True
    corrects = True
    reads_proximal = False

    level: str = param(
        "sequence",
        "kind of the ratio W; sequence: the product of the ratios of the sequence's tokens; geometric: their geometric "
        "mean",
        choices=("sequence", "geometric"),
    )
    cap: float = param(1.0, "largest weight where A < 0", "(0, inf]")

    def __call__(self, updates: Updates) -> TokenLosses:
        bad, ratio = updates.advantages < 0, log_behaviour_ratio(updates, self.level).exp()
        weights = torch.where(bad, ratio.clamp(max=self.cap), 1.0)
        marks = {"high": bad & (ratio > self.cap), "faded": weights < FADED}
        return TokenLosses(-weights * updates.advantages * updates.logprobs, marks)
