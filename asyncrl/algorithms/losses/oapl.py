from __future__ import annotations

from asyncrl.algorithms.log_ratios import clamp_log
from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates
from asyncrl.algorithms.parts import param


class Oapl(Loss):
    """Optimal advantage-based policy optimisation with a lagged inference policy: a regression. It trains the log-ratio
    of a sequence to the behaviour policy, times beta, to equal the sequence's advantage. For the best policy near the
    behaviour policy, the two are equal.

    Formula: (beta (sum of log(pi_theta / mu)) - mean of A)^2 for every token, both over its sequence
    Use: for very old data, with advantage oapl: it needs neither importance weights nor a clip, because mu is part of
    the target. Choose aggregation seq-mean-token-mean
    Source: LLMs Can Learn to Reason Via Off-Policy RL, 2026 (eq. 3), with a beta of its own, as in an implementation
    for NeMo RL
    Caveat: choose beta so that sequences can reach the log-ratio A / beta. With a much smaller beta, the loss is a
    policy gradient without a trust region. It then lowers most log-probs, since the advantages of the part oapl have a
    mean below 0. Where pi_theta = mu, the gradient is 2 beta times the gradient of the loss gpg with aggregation
    seq-mean-token-sum. A sequence with A = 0 is pulled back to mu. Corrections must not set weights or treat tokens of
    a sequence differently, and a prioritised sampler must not weigh the advantages.
    """

    name = "oapl"
    sequence_level = True
    corrects = True
    reads_proximal = False
    is_proportional = False

    beta: float = param(0.1, "advantage that corresponds to one nat of the log-ratio", "(0, inf)")

    def __call__(self, updates: Updates) -> TokenLosses:
        spans = updates.view.sequences
        moved = spans.sum(clamp_log(updates.logprobs - updates.behaviour))
        losses = (self.beta * moved - spans.mean(updates.advantages)).square()
        return TokenLosses(spans.spread(losses.to(updates.logprobs.dtype)))
