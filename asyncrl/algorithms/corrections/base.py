"""What every correction is given and gives back, and the levels at which a ratio is taken.

Log-ratios are clamped to +-20 before exp, at every level. A rule sees the M policy tokens of whole sequences; weights
never carry gradient. The weight of a token is 1 unless a rule sets it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Episodes, Reduce
from asyncrl.algorithms.parts import Part, param
from asyncrl.algorithms.view import LEVEL_MEANING, LEVELS, View, at_level


@dataclass(frozen=True, slots=True, eq=False)
class Ages:
    """What a rule reads: log_w float[M], log pi_prox - log mu (clamped); advantages float[M]; and what the rules before
    it left: weights float[M], None where all are 1; weighs_sequences, whether they are one a sequence; rejected
    int32[M], bit k set where rule k dropped the token, None where none is dropped.

    behaviour and proximal float[M], log mu and log pi_prox, are there for rules that compare probabilities; log_policy
    float[M], log pi_theta - log mu (clamped), for those that follow the policy as it moves; reduce and episodes
    for those that look at the whole batch, once before the updates.
    """

    view: View
    log_w: Tensor
    advantages: Tensor
    weights: Tensor | None = None
    weighs_sequences: bool = False
    rejected: Tensor | None = None
    behaviour: Tensor | None = None
    proximal: Tensor | None = None
    log_policy: Tensor | None = None
    reduce: Reduce | None = None
    episodes: Episodes | None = None

    def kept(self, values: Tensor) -> Tensor:
        """values float[M] with 0 in place of those of dropped tokens."""
        return values if self.rejected is None else torch.where(self.rejected == 0, values, 0.0)

    def after(self, bit: int, rule: Correction) -> Ages:
        """What the rule leaves. It judges every token, also those dropped before, so that its share does not depend on
        other rules."""
        weights, keep = rule.weigh(self), rule.keep(self)
        rejected = self.rejected
        if keep is not None:
            dropped = (~keep).int() << bit
            rejected = dropped if rejected is None else rejected | dropped
        return replace(
            self,
            weights=self.weights if weights is None else weights,
            weighs_sequences=not rule.by_token if rule.weighs else self.weighs_sequences,
            rejected=rejected,
        )


class Correction(Part):
    """Base of the corrections; a rule overrides `weigh`, `keep`, or both.

    weighs: sets w. by_token: treats tokens of one sequence differently, which sequence-level losses refuse.
    whole_batch: needs the global batch before the updates. follows_policy: is applied again in every forward pass.
    uses_ratio: reads log_w or proximal.
    """

    kind = "correction"
    weighs: ClassVar[bool] = False
    whole_batch: ClassVar[bool] = False
    follows_policy: ClassVar[bool] = False
    uses_ratio: ClassVar[bool] = True

    @property
    def by_token(self) -> bool:
        return False

    def weigh(self, ages: Ages) -> Tensor | None:
        """float[M], the new weights, or None to leave them."""
        return None

    def keep(self, ages: Ages) -> Tensor | None:
        """bool[M], false on tokens to drop, or None to drop nothing."""
        return None


class LevelCorrection(Correction):
    """A correction whose ratio is taken at a level."""

    level: str = param("token", LEVEL_MEANING, choices=LEVELS)

    @property
    def by_token(self) -> bool:
        return self.level in ("token", "turn", "turn_geometric")

    def ratio(self, ages: Ages) -> Tensor:
        """float[M]: w at the level, on each of its tokens."""
        return at_level(ages.log_w, ages.view, self.level).exp()
