"""Drop a sequence for one catastrophic token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.parts import param


@dataclass(frozen=True, kw_only=True)
class Veto(Correction):
    """Drops a whole sequence if the proximal policy would hardly have sampled one of its tokens.

    Formula: drop the sequence if min over its tokens of pi_prox / mu < threshold
    Use: beside any weights, against corrupted or wholly foreign samples
    Source: When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch, 2025
    Caveat: the longer the sequence, the likelier one such token; keep the threshold tiny. Below 2e-9, exp(-20), it
    never fires.
    """

    name: ClassVar[str] = "veto"

    threshold: float = param(1e-4, "smallest ratio that a token may have", "(0, 1)")

    def keep(self, ages: Ages) -> Tensor:
        spans = ages.view.sequences
        lowest = -spans.max(-ages.log_w)
        return spans.spread(lowest.exp() >= self.threshold)
