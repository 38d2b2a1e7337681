"""KL forms: estimates of KL(pi_theta || pi_ref) on the sampled tokens, in the reward or in the loss.

d = log pi_theta - log pi_ref, clamped to +-10. A form with "+" has the value of the form without "+", and the gradient
of k2, which is unbiased on on-policy data. With importance_weighted, all forms except abs have the gradient of the KL
on data of any age. The source for k3 with importance_weighted is DeepSeek-V3.2: Pushing the Frontier of Open Large
Language Models, 2025.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from asyncrl.algorithms.log_ratios import clamp_log
from asyncrl.algorithms.parts import Part, param
from asyncrl.config.option import Option
from asyncrl.config.other_words import with_kl
from asyncrl.errors import ConfigError

D_LIMIT = 10.0


class Kl(Part):
    """Base of the forms.

    differentiates_ratio: if it is true, importance_weighted lets the gradient flow through the ratio too. The result is
    then the gradient of the mean of the form under pi_theta. It is false for forms whose own gradient is already the
    gradient of the KL: otherwise the two gradients would be added.
    """

    kind = "kl"
    differentiates_ratio: ClassVar[bool] = True

    weight: float = param(1e-3, "coefficient; with target, its initial value", "[0, inf)")
    place: str = param(
        "loss",
        "loss: add the KL to the loss; reward: subtract the KL of the proximal policy from the reward (with "
        "algorithm.proximal=behaviour, this is the policy that sampled)",
        choices=("loss", "reward"),
    )
    target: float | None = param(
        None,
        "KL per token at which the coefficient aims: it is adapted after each step; null: the coefficient is fixed, as "
        "it must be with algorithm.proximal=behaviour",
        "(0, inf)",
    )
    horizon: int = param(
        10000,
        "with target: number of sequences after which the coefficient may have changed by about a fifth",
        "[1, inf)",
    )

    importance_weighted: bool = param(
        False,
        "with place=loss: multiply the KL of a token by pi_theta / mu, so that old data give the same mean as data of "
        "the current policy",
    )

    @abstractmethod
    def form(self, d: Tensor) -> Tensor:
        """float[M]: the estimate at d float[M]."""

    def __call__(self, logprobs: Tensor, reference: Tensor) -> Tensor:
        """float[M]: the estimate for each token; gradient flows through `logprobs`."""
        return self.form((logprobs - reference).clamp(-D_LIMIT, D_LIMIT))

    def weighted(self, logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
        """float[M]: the estimate times pi_theta / mu, for each token. `behaviour` float[M] is log mu."""
        log_ratio = clamp_log(logprobs - behaviour)
        ratio = (log_ratio if self.differentiates_ratio else log_ratio.detach()).exp()
        return ratio * self(logprobs, reference)

    def adapted(self, weight: float, current: float, sequences: int) -> float:
        """The KL coefficient for the next batch, after a batch of `sequences` sequences with a KL of `current` per
        token. `weight` was the coefficient for that batch. The coefficient changes by at most a fifth.

        Source: Fine-Tuning Language Models from Human Preferences, 2019, whose batches are smaller than the horizon.
        """
        if self.target is None:
            return weight
        error = max(-0.2, min(0.2, current / self.target - 1))
        # Without this limit, a batch of more than five horizons could make the coefficient negative.
        return weight * (1 + error * min(1.0, sequences / self.horizon))


class K1(Kl):
    """The log-ratio itself.

    Formula: d
    Use: for a KL in the reward, where it is unbiased
    Source: Approximating KL Divergence, 2020
    Caveat: in the loss, its gradient is 0 on average: choose k1+ or k2 there. The value can be negative.
    """

    name = "k1"

    def form(self, d: Tensor) -> Tensor:
        return d


class Abs(Kl):
    """The absolute log-ratio.

    Formula: |d|
    Use: for a penalty in the reward that outliers do not dominate
    Source: no paper: a common option of RLHF libraries
    Caveat: it does not estimate the KL.
    """

    name = "abs"

    def form(self, d: Tensor) -> Tensor:
        return d.abs()


class K2(Kl):
    """Half the squared log-ratio.

    Formula: d^2 / 2
    Use: for a KL in the loss: on on-policy data, its gradient is the gradient of the KL
    Source: Approximating KL Divergence, 2020
    Caveat: its value is biased, but only slightly if the policies are close.
    """

    name = "k2"
    differentiates_ratio = False

    def form(self, d: Tensor) -> Tensor:
        return d.square() / 2


class K3(Kl):
    """The unbiased estimate that is never negative.

    Formula: min(e^-d + d - 1, cap); the gradient is 0 beyond the cap
    Use: for a KL in the loss, as in GRPO, and as a metric
    Source: Approximating KL Divergence, 2020
    Caveat: its gradient is the gradient of the reverse KL, KL(pi_ref || pi_theta); k3+ has the right gradient. A token
    beyond the cap (d < -2.6 by default) is not pulled back, but without a cap a single such token can outweigh the
    batch.
    """

    name = "k3"

    cap: float = param(10.0, "largest value of a token; inf: no cap", "(0, inf]")

    def form(self, d: Tensor) -> Tensor:
        return (torch.expm1(-d) + d).clamp(max=self.cap)

    def weighted(self, logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
        result = super().weighted(logprobs, reference, behaviour)
        if not self.differentiates_ratio:
            return result
        # The gradient through the ratio and the gradient through k3 add up to the gradient of the KL. Beyond a bound,
        # k3 has no gradient. The gradient through the ratio alone would push a token further away from the reference.
        d = (logprobs - reference).detach()
        beyond = (d <= -D_LIMIT) | (self.form(d.clamp(-D_LIMIT, D_LIMIT)) >= self.cap)
        return torch.where(beyond, result.detach(), result)


class _K2Gradient(Kl):
    """A mixin for a form: keeps the form's value, and replaces its gradient by the gradient of k2."""

    differentiates_ratio = False

    def __call__(self, logprobs: Tensor, reference: Tensor) -> Tensor:
        d = (logprobs - reference).clamp(-D_LIMIT, D_LIMIT)
        k2 = d.square() / 2
        return self.form(d).detach() + k2 - k2.detach()


class K1Plus(_K2Gradient, K1):
    """The log-ratio, with the gradient of k2.

    Formula: d, but with the gradient of d^2 / 2
    Use: for a KL in the loss whose reported value should be unbiased
    Source: On a few pitfalls in KL divergence gradient estimation for RL, 2025
    Caveat: the value can be negative.
    """

    name = "k1+"


class AbsPlus(_K2Gradient, Abs):
    """The absolute log-ratio, with the gradient of k2.

    Formula: |d|, but with the gradient of d^2 / 2
    Use: for completeness
    Source: On a few pitfalls in KL divergence gradient estimation for RL, 2025
    Caveat: the value does not estimate the KL.
    """

    name = "abs+"


class K2Plus(_K2Gradient, K2):
    """The same as k2, whose gradient is right already.

    Formula: d^2 / 2
    Use: for completeness; it is the same as k2
    Source: Approximating KL Divergence, 2020
    """

    name = "k2+"


class K3Plus(_K2Gradient, K3):
    """The unbiased, never negative value, with the gradient of k2.

    Formula: min(e^-d + d - 1, cap), but with the gradient of d^2 / 2
    Use: for a KL in the loss with an unbiased value and the right gradient
    Source: On a few pitfalls in KL divergence gradient estimation for RL, 2025
    """

    name = "k3+"


class NoKl(Kl):
    """No KL, and no reference policy.

    Formula: 0
    Use: for verifiable rewards, where a reference would only hold the policy back
    Source: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025
    """

    name = "none"

    @classmethod
    def parameters(cls) -> Sequence[Option]:
        return ()

    @classmethod
    def build(cls, params: Mapping[str, Any]) -> Self:
        if params:
            raise ConfigError(
                f"algorithm.kl none adds no KL, so that {', '.join(params)} would have no effect: write "
                f"{with_kl(params)}, or algorithm.kl=none for no KL"
            )
        return super().build(params)

    def form(self, d: Tensor) -> Tensor:
        return torch.zeros_like(d)
