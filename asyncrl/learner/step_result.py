"""The result of a learner step, and the sums over passes that it is made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from asyncrl.learner.model.optimizer import Trainable

LOSS = "learner/loss"
"""The name of the loss among the sums."""

Sums = dict[str, Tensor]
"""Named tensors, added up over passes."""


@dataclass(slots=True)
class StepResult:
    """The result of one learner step, the same on every rank."""

    loss: float = 0.0
    """The mean loss of the updates."""
    norms: list[float] = field(default_factory=list)
    """The gradient norms of the policy's updates that did not overflow."""
    too_large: int = 0
    """The number of updates of any model that were left out because the gradient was too large."""
    overflowed: int = 0
    """The number of updates of any model that were left out because the gradient overflowed float16."""
    lr_scales: list[float] = field(default_factory=list)
    """The factors of the policy's learning rate in the updates, if the algorithm has a scale."""
    summary: dict[str, float] = field(default_factory=dict)
    """Maps the names of the metrics of the algorithm and of the models to their values."""
    ratios: dict[str, list[float]] = field(default_factory=dict)
    """Maps the names of the raw and the corrected importance weights to the number of tokens in each bin."""

    @property
    def mean_norm(self) -> float:
        """The mean norm of the gradients that are finite."""
        finite = [norm for norm in self.norms if math.isfinite(norm)]
        return sum(finite) / max(1, len(finite))

    @property
    def skipped(self) -> int:
        """The number of updates that were left out because the gradient was not finite."""
        return sum(not math.isfinite(norm) for norm in self.norms)

    @property
    def empty(self) -> int:
        """The number of updates that were left out because the gradient was 0, since nothing was left to learn from."""
        return self.norms.count(0.0)


def add_sums(sums: Sums, more: Mapping[str, Tensor]) -> None:
    """Add the tensors of `more` to the ones of `sums`, in float64."""
    for name, value in more.items():
        value = value.detach().double()
        sums[name] = sums[name] + value if name in sums else value


def add_gradient(model: Trainable[Any], output: Tensor, rows: Tensor, loss: Callable[[], tuple[Tensor, Sums]]) -> Sums:
    """Add the gradient of `loss`, a loss of the model's `output`, to the gradient of the model. Returns the sums of the
    loss.

    Ranks that divide the tokens of a pass (a context group) have the same `output` and loss. Each of them adds the
    gradient of its own tokens.
    """
    if not len(rows):
        # A pass without tokens of the batch (`rows`) adds a gradient of 0. It only takes part in the collectives of the
        # other ranks.
        (output.sum() * 0).backward()
        return {}
    value, sums = loss()
    (value * model.loss_factor).backward()
    return sums
