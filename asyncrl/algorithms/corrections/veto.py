from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.parts import param


class Veto(Correction):
    """Drops a whole sequence if one of its tokens is very unlikely under the proximal policy.

    Formula: drop the sequence if pi_prox / mu < threshold for one of its tokens
    Use: with or without the weights of another correction, against samples that are corrupted or came from another
    model
    Source: When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch, 2025
    Caveat: longer sequences are more likely to have such a token, so choose a tiny threshold. A threshold below 2e-9
    (exp(-20), the smallest ratio) drops nothing.
    """

    name = "veto"

    threshold: float = param(1e-4, "smallest ratio that a token may have", "(0, 1)")

    def keep(self, ages: Ages) -> Tensor:
        spans = ages.view.sequences
        lowest = -spans.max(-ages.log_w)
        return spans.spread(lowest.exp() >= self.threshold)
