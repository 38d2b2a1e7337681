from __future__ import annotations

from asyncrl.algorithms.corrections.base import Correction


class NoCorrection(Correction):
    """Treats the data as if the proximal policy had sampled them. An empty list of corrections does the same.

    Formula: w = 1
    Use: for on-policy data, or if the advantage or the loss corrects by itself (vtrace, reinforce)
    Source: Proximal Policy Optimization Algorithms, 2017, with recomputed log-probs
    Caveat: the gradient is biased as soon as the behaviour policy and the proximal policy differ.
    """

    name = "none"
    uses_ratio = False
