from __future__ import annotations

from asyncrl.algorithms.corrections.base import Correction


class NoCorrection(Correction):
    """Treats the data as if the proximal policy had sampled them. An empty list of corrections does the same.

    Formula: w = 1
    Use: on-policy data, or an advantage or loss that includes a correction (vtrace, reinforce)
    Source: Proximal Policy Optimization Algorithms, 2017, with recomputed log-probs
    Caveat: biased as soon as behaviour and proximal policy differ.
    """

    name = "none"
    uses_ratio = False
