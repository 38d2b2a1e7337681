"""The base classes of policy losses, with their input and output.

A loss returns one number per token. step_loss.py multiplies it by the importance weight, aggregates the products, and
computes the metrics.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Reduce
from asyncrl.algorithms.log_ratios import at_level, clamp_log
from asyncrl.algorithms.parts import Part, param
from asyncrl.algorithms.policy_tokens import PolicyTokens

FADED = 0.01
"""A weight below this number has nearly no effect. Losses that weigh whole sequences mark the tokens with such a weight
as `faded`."""


@dataclass(frozen=True, slots=True, eq=False)
class Updates:
    """The M kept policy tokens of one forward pass.

    - `logprobs` float[M]: log pi_theta, with gradient
    - `proximal`, `behaviour`, `advantages` float[M]: without gradient
    - `selected` [M]: the result of `Loss.select`, or None
    - `log_ratio` float[M]: log r = log pi_theta - log pi_prox, clamped to +-20, with gradient. It is computed from the
      fields above
    """

    view: PolicyTokens
    logprobs: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    selected: Tensor | None = None
    log_ratio: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "log_ratio", clamp_log(self.logprobs - self.proximal))

    def ratio(self) -> Tensor:
        """r float[M]; with gradient."""
        return self.log_ratio.exp()


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """The `losses` float[M] of the tokens. `marks` maps names to bool[M]: true on the tokens that the loss treated in a
    special way, for example clipped. The share of these tokens is reported as `clip/NAME`."""

    losses: Tensor
    marks: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The M policy tokens of this rank. Once a step, `Loss.select` decides how to treat each of them.

    - `proximal`, `behaviour`, `advantages` float[M]
    - `draw` float[M]: pseudo-random numbers in [0, 1). A token's number does not depend on the rank that has the token
    - `reduce`: sums over the ranks
    """

    view: PolicyTokens
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    draw: Tensor
    reduce: Reduce

    def covariance(self) -> tuple[Tensor, int]:
        """The product (log pi - mean)(A - mean) float64[M] at the start of the step, and the number of policy tokens in
        the global batch.

        The means are over the global batch. Updates of tokens with a high covariance lower the entropy most.
        """
        logprobs, advantages = self.proximal.double(), self.advantages.double()
        sums = torch.stack([logprobs.sum(), advantages.sum(), logprobs.new_tensor(logprobs.numel())])
        logprob_sum, advantage_sum, count = self.reduce(sums)
        total = count.clamp(min=1)
        return (logprobs - logprob_sum / total) * (advantages - advantage_sum / total), int(count)


class Loss(Part):
    """Base of the policy losses.

    - `sequence_level`: it has one ratio per sequence, so corrections must not treat tokens of a sequence differently.
    - `corrects`: it accounts for mu itself, mostly by pi_theta / mu, so no correction may set weights.
    - `selects`: before the updates, it decides how to treat each token.
    - `reads_proximal`: it reads the ratio r, or other values of the proximal policy.
    - `uses_ratio`: it reads pi_prox / mu.
    - `is_proportional`: the advantage is a factor of the loss (a penalty may be added), so a sampler's importance
      weights may multiply the advantage. A regression to the advantage has no such factor.
    """

    kind = "loss"
    sequence_level: ClassVar[bool] = False
    corrects: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    reads_proximal: ClassVar[bool] = True
    uses_ratio: ClassVar[bool] = False
    is_proportional: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, updates: Updates) -> TokenLosses:
        """The loss of every token, before weights and aggregation."""

    def select(self, candidates: Candidates) -> Tensor:
        """bool[M], true on the selected tokens, or float[M], a number for each token."""
        raise NotImplementedError


class ClippedLoss(Loss):
    """A loss with a ratio clipped to [1 - clip_low, 1 + clip_high]. A larger clip_high is known as clip-higher."""

    clip_low: float = param(0.2, "the ratio is clipped to at least 1 - clip_low", "[0, 1]")
    clip_high: float = param(0.2, "the ratio is clipped to at most 1 + clip_high", "[0, inf]")

    def clip(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1 - self.clip_low, 1 + self.clip_high)

    def marks(self, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """Maps the name of each bound of the clip to bool[M], true on the tokens whose ratio crosses it: the clip
        removes their gradient."""
        return {
            "high": (ratio > 1 + self.clip_high) & (advantages > 0),
            "low": (ratio < 1 - self.clip_low) & (advantages < 0),
        }


class DualClippedLoss(ClippedLoss):
    """A clipped loss with an optional further bound for negative advantages."""

    dual_clip: float | None = param(None, "largest r that the loss counts where A < 0; null: no bound", "(1, inf]")

    def bounded(self, ratio: Tensor, advantages: Tensor) -> TokenLosses:
        """The clipped surrogate loss for ratio float[M]. If A < 0, it is at most -dual_clip A."""
        losses, marks = surrogate(ratio, self.clip(ratio), advantages), self.marks(ratio.detach(), advantages)
        if self.dual_clip is not None:
            losses, marks["dual"] = dual_clipped(losses, advantages, self.dual_clip)
        return TokenLosses(losses, marks)


def log_behaviour_ratio(updates: Updates, level: str) -> Tensor:
    """float[M]: log(pi_theta / mu) over the span that `level` names (see LEVEL_MEANING), clamped and without
    gradient."""
    return at_level(clamp_log(updates.logprobs.detach() - updates.behaviour), updates.view, level)


def capped_ratio(updates: Updates, cap: float) -> Tensor:
    """float[M]: min(pi_theta / mu, cap). Its gradient is its value times the gradient of log pi_theta, even beyond the
    cap."""
    policy = updates.logprobs
    ratio = clamp_log(policy.detach() - updates.behaviour).exp().clamp(max=cap)
    return ratio * (policy - policy.detach()).exp()


def dual_clipped(losses: Tensor, advantages: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """`losses` float[M], bounded by -limit A where A < 0, and bool[M], true on the tokens that the bound changes.

    Source: Mastering Complex Control in MOBA Games with Deep Reinforcement Learning, 2020.
    """
    bound = torch.where(advantages < 0, -limit * advantages, torch.inf)
    return torch.minimum(losses, bound), losses.detach() > bound


def surrogate(ratio: Tensor, clipped: Tensor, advantages: Tensor) -> Tensor:
    """float[M]: -min(r A, clipped A)."""
    return -torch.minimum(ratio * advantages, clipped * advantages)
