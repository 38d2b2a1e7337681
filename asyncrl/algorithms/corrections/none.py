"""No importance weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.algorithms.corrections.base import Correction


@dataclass(frozen=True, kw_only=True)
class NoCorrection(Correction):
    """Takes the data as if the proximal policy had sampled it; the same as an empty list.

    Formula: w = 1
    Use: on-policy data, or an advantage or loss that corrects by itself (vtrace, reinforce)
    Source: Proximal Policy Optimization Algorithms, 2017, with recomputed log-probs
    Caveat: biased as soon as behaviour and proximal policy differ.
    """

    name: ClassVar[str] = "none"
    uses_ratio: ClassVar[bool] = False
