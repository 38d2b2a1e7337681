"""The critic's losses."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import Aggregation
from asyncrl.algorithms.batch import Tokens, Totals
from asyncrl.algorithms.parts import Part, param
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.errors import InvariantError


class Value(Part):
    """Base of the value losses."""

    kind = "value"

    @abstractmethod
    def __call__(self, values: Tensor, old: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
        """The losses float[M] of `values`, and bool[M], true on the tokens whose loss is limited (clipped, or linear as
        in `HuberValue`). `values`, `old` and `returns` are float[M]."""


class ClippedValue(Value):
    """The larger of two squared errors. One is the value's error, relative to the return. The other is the error of the
    value after it is clipped to a range around the old value.

    Formula: max((V - R)^2, (min(max(V, V_old - clip), V_old + clip) - R)^2) / 2; with V the value, V_old the value
    before the step, and R the return
    Use: by default, for the critic of gae and vtrace; clip=null gives the plain squared error
    Source: Proximal Policy Optimization Algorithms, 2017 (its reference implementation)
    Caveat: the clip has the unit of the return: use a wider clip for large returns.
    """

    name = "clipped"

    clip: float | None = param(0.2, "largest move of a value from V_old that is not clipped; null: no clip", "(0, inf]")

    def __call__(self, values: Tensor, old: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
        plain = (values - returns).square()
        if self.clip is None:
            return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
        bounded = (values.clamp(old - self.clip, old + self.clip) - returns).square()
        return torch.maximum(plain, bounded) / 2, bounded.detach() > plain.detach()


class HuberValue(Value):
    """The squared error near the return, and the absolute error far from it, which limits the effect of outliers.

    Formula: e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2); with e = V - R
    Use: when returns have outliers, such as rare large rewards
    Source: Robust Estimation of a Location Parameter, 1964
    Caveat: delta has the unit of the return.
    """

    name = "huber"

    delta: float = param(1.0, "error above which the loss is linear", "(0, inf)")

    def __call__(self, values: Tensor, old: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
        losses = torch.nn.functional.huber_loss(values, returns, reduction="none", delta=self.delta)
        return losses, (values.detach() - returns).abs() > self.delta


def value_loss(
    values: Tensor, tokens: Tokens, totals: Totals, value: Value, aggregation: Aggregation
) -> tuple[Tensor, dict[str, Tensor]]:
    """The value loss of this micro-batch, and sums for metrics.

    Both are added over micro-batches and ranks. `values` float[N] has a gradient. tokens.values and tokens.returns
    float[N] come from `Algorithm.prepare`. Tokens that corrections drop still train the critic. Raises InvariantError:
    shapes differ, or there are no returns.
    """
    if tokens.values is None or tokens.returns is None or values.shape != tokens.mask.shape:
        raise InvariantError(
            f"value_loss needs tokens.values and tokens.returns (from an advantage with a critic), and values "
            f"of shape {list(tokens.mask.shape)}, not {list(values.shape)}"
        )
    view = PolicyTokens.of(tokens)
    now, old, returns = view.take(values), view.take(tokens.values), view.take(tokens.returns)
    losses, clipped = value(now, old, returns)
    error = returns - now.detach()
    sums = {
        "value/tokens": error.new_full((), error.numel(), dtype=torch.float64),
        "value/error": error.sum(dtype=torch.float64),
        "value/error_squared": error.double().square().sum(),
        "value/clipped": clipped.count_nonzero().double(),
    }
    return aggregation(losses, view.sequences, view.sequences.lengths, totals.of_pass(view.owner)), sums
