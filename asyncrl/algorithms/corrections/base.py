"""The base classes of corrections, and their input `Ages`: the ratios of the proximal policy (at the start of the step)
to the behaviour policy (which sampled the tokens).

Log-ratios are clamped to +-20 before exp, at every level. A correction, here also called a rule, sees the M policy
tokens of whole sequences. Weights have no gradient. The weight of a token is 1 unless a rule sets it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Episodes, Reduce
from asyncrl.algorithms.log_ratios import LEVEL_MEANING, LEVELS, at_level
from asyncrl.algorithms.parts import Part, param
from asyncrl.algorithms.policy_tokens import PolicyTokens


@dataclass(frozen=True, slots=True, eq=False)
class Ages:
    """The input of a rule.

    - `log_w` float[M]: log pi_prox - log mu (clamped)
    - `advantages` float[M]

    The results of earlier rules:

    - `weights` float[M] (None: all are 1)
    - `weighs_sequences`: true if all tokens of a sequence have the same weight
    - `rejected` int32[M]: bit k is set if rule k dropped the token (None: no token is dropped)

    Only some rules read these:

    - `behaviour`, `proximal` float[M]: log mu and log pi_prox, for rules that compare probabilities
    - `log_policy` float[M]: log pi_theta - log mu (clamped), for rules that follow the policy in every pass
    - `reduce`, `episodes`: for rules that run over the whole batch, once before the updates
    """

    view: PolicyTokens
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
        """`values` float[M], with 0 in place of the values of dropped tokens."""
        return values if self.rejected is None else torch.where(self.rejected == 0, values, 0.0)

    def after(self, bit: int, rule: Correction) -> Ages:
        """The ages with the results of one more rule, `rule`. On the tokens that it drops, `rejected` has the bit `bit`
        set."""
        # Rules also judge dropped tokens, so that a rule's share in the metrics does not depend on other rules.
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
    """Base of the corrections. A correction overrides `weigh`, `keep`, or both.

    - `weighs`: it sets weights.
    - `by_token`: it judges single tokens or turns, and so may weigh or drop only some tokens of a sequence.
      Sequence-level losses refuse such a correction.
    - `by_advantage`: it judges each token by its own advantage. Sequence-level losses refuse such a correction if the
      tokens of a sequence may have different advantages.
    - `whole_batch`: it needs the whole global batch, so it runs once before the updates.
    - `follows_policy`: it is applied in every forward pass.
    - `uses_ratio`: it reads `log_w` or `proximal`.
    """

    kind = "correction"
    weighs: ClassVar[bool] = False
    whole_batch: ClassVar[bool] = False
    follows_policy: ClassVar[bool] = False
    by_advantage: ClassVar[bool] = False
    uses_ratio: ClassVar[bool] = True

    @property
    def by_token(self) -> bool:
        return False

    def weigh(self, ages: Ages) -> Tensor | None:
        """The new weights float[M], or None to keep the current weights."""
        return None

    def keep(self, ages: Ages) -> Tensor | None:
        """bool[M], false on the tokens to drop, or None to drop no token."""
        return None


class LevelCorrection(Correction):
    """A correction whose ratio is taken over a configurable span of tokens, the `level`."""

    level: str = param("token", LEVEL_MEANING, choices=LEVELS)

    @property
    def by_token(self) -> bool:
        return self.level in ("token", "turn", "turn_geometric")

    def ratio(self, ages: Ages) -> Tensor:
        """float[M]: for each token, the ratio w over its span."""
        return at_level(ages.log_w, ages.view, self.level).exp()
