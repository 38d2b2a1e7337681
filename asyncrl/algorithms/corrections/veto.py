from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.parts import param


class Veto(Correction):
    """Drops a whole sequence if the proximal policy would hardly have sampled one of its tokens.

    Formula: drop the sequence if min over its tokens of pi_prox / mu < threshold
    Use: with any weights, against corrupted or foreign samples
    Source: When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch, 2025
    Caveat: a longer sequence is likelier to have such a token: keep the threshold tiny. Below 2e-9, which is exp(-20),
    it drops nothing.
    """

    name = "veto"

    threshold: float = param(1e-4, "smallest ratio that a token may have", "(0, 1)")

    def keep(self, ages: Ages) -> Tensor:
        spans = ages.view.sequences
        lowest = -spans.max(-ages.log_w)
        return spans.spread(lowest.exp() >= self.threshold)
