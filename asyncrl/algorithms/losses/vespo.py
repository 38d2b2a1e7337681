from __future__ import annotations

import torch

from asyncrl.algorithms.losses.base import FADED, Loss, TokenLosses, Updates, log_behaviour_ratio
from asyncrl.algorithms.parts import param

# The allowed ranges of k and lambda. Log-ratios are at most 20, so every weight is at most exp(80), which is finite in
# float32.
POWERS, DECAYS = "[0, 4]", "(0, 80]"


class Vespo(Loss):
    """Variational sequence-level soft policy optimisation: a smooth weight for each sequence, which fades as the
    sequence's probability moves away from the behaviour policy's in either direction. It replaces the clip.

    Formula: -sg(W^k exp(lambda (1 - W))) A log pi_theta, with W the product of pi_theta / mu over the sequence; k and
    lambda are k_pos and lambda_pos where A >= 0, else k_neg and lambda_neg
    Use: for old data and rewards of whole episodes: one weight corrects a sequence, and it does not depend on a
    proximal policy
    Source: VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training, 2026 (there
    c1 is k and c2 is lambda), with the parameters of its code
    Caveat: W is a product, without the root of gspo, so most long sequences of old data have weights of nearly 0. The
    metric clip/faded is the share of tokens with a weight below 0.01. The weight is 1 at W = 1, and largest at
    W = k / lambda. With proximal=behaviour the metric update/k3 has the distance to mu, and mismatch/k3 is 0.
    Corrections must not set weights or treat tokens of a sequence differently.
    """

    name = "vespo"
    sequence_level = True
    corrects = True
    reads_proximal = False

    k_pos: float = param(2.0, "k where A >= 0: the larger, the smaller the weights of unlikely sequences", POWERS)
    lambda_pos: float = param(3.0, "lambda where A >= 0: the larger, the smaller the weights at large W", DECAYS)
    k_neg: float = param(3.0, "k where A < 0", POWERS)
    lambda_neg: float = param(2.0, "lambda where A < 0", DECAYS)

    def __call__(self, updates: Updates) -> TokenLosses:
        advantages, log_ratio = updates.advantages, log_behaviour_ratio(updates, "sequence")
        negative = advantages < 0
        power = torch.full_like(log_ratio, self.k_pos).masked_fill(negative, self.k_neg)
        decay = torch.full_like(log_ratio, self.lambda_pos).masked_fill(negative, self.lambda_neg)
        weights = (power * log_ratio - decay * log_ratio.expm1()).exp()
        return TokenLosses(-weights * advantages * updates.logprobs, {"faded": weights < FADED})
