"""Loss streams: several losses that are trained together, each with a weight for every sequence. The whole loss is the
sum of the streams.

The stream rl is the policy's loss. If the configuration does not list rl, the policy's loss has weight 1 on every
token. Every other stream, such as ce or ref_kl, has its own loss and trains all policy tokens, also tokens that
corrections drop. Each stream is divided by a number of its own (`stream_weights`), so that a stream with few tokens or
small weights does not become small.

Source: the streams rl, ce and ref_kl of the library prime-rl, 2026, which have a weight for each token. Here the weight
is the same for all tokens of a sequence.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Episodes, Reduce
from asyncrl.algorithms.losses.base import TokenLosses, Updates, capped_ratio
from asyncrl.algorithms.parts import Part, param
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.errors import ConfigError, InvariantError


class Stream(Part):
    """Base of streams. If `by_weight` is true, a stream's loss is divided by the mean of its weights over the policy
    tokens of the global batch. Otherwise it is divided by the share of these tokens whose weight is above 0."""

    kind = "stream"
    by_weight: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False

    weight: float = param(
        1.0, "number that multiplies the loss of every token; 0: the stream trains nothing", "[0, inf)"
    )
    score: str | None = param(
        None,
        "name of a score of the labels (reward, outcome, or an extra score), which also multiplies the loss of its "
        "sequence's tokens; a negative score counts as 0; null: no score",
    )

    @property
    def reads(self) -> Sequence[str]:
        return [] if self.score is None else [self.score]

    def weights(self, episodes: Episodes) -> Tensor:
        """float64[S]: the weight of each sequence's tokens, which is `weight` times the score. Raises InvariantError: a
        score is not finite."""
        if self.score is None:
            return torch.full_like(episodes.reward, self.weight, dtype=torch.float64)
        scores = episodes.score(self.score).double()
        if bad := (~scores.isfinite()).nonzero().tolist():
            row = bad[0][0]
            raise InvariantError(
                f"stream {self.name}: {self.score} is {float(scores[row])} for sequence {row}; a weight must be finite"
            )
        # A penalty can make a reward negative. Such a score counts as 0, and does not end the run.
        return self.weight * scores.clamp(min=0)


class LossStream(Stream):
    """Base of the streams that have their own loss: all streams except rl. `reads_proximal` means the same as in the
    class `Loss`."""

    reads_proximal: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, updates: Updates, reference: Tensor | None) -> TokenLosses:
        """Compute the loss of every policy token of the pass, before it is multiplied by weights.

        `reference` float[M] is log pi_ref. It may be None if `needs_reference` is false.
        """


class Rl(Stream):
    """The policy's loss, with a weight for each sequence.

    Formula: (c / mean of c) L; L is the policy's loss of a token; c = weight * score; the mean is over the policy
    tokens of the batch
    Use: to train the policy's loss only on the sequences whose score is above 0. With weight=0, it trains on no
    sequence, and only the other streams are trained
    Source: the stream rl of the library prime-rl, 2026
    Caveat: sequences with weight 0 stay in the baselines of their groups. KL and entropy are not weighted. The division
    by the mean cancels `weight`, so only `weight=0` has an effect.
    """

    name = "rl"
    by_weight = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score is None and self.weight not in (0, 1):
            raise ConfigError(
                f"{self.setting('weight')}: the stream is divided by the mean of its weights, so the same weight for "
                "all tokens has no effect: set score, or weight=0"
            )


class Ce(LossStream):
    """Cross-entropy: makes the tokens likelier, independent of the advantage.

    Formula: -(c / f) log pi_theta; c = weight * score; f is the fraction of the batch's policy tokens with c > 0
    Use: to fine-tune on successful episodes (score=outcome), or on episodes that a score of your own marks as
    demonstrations
    Source: the stream ce of the library prime-rl, 2026
    Caveat: it trains only policy tokens. In prime-rl, tokens of tool results may have a weight too.
    """

    name = "ce"
    reads_proximal = False

    def __call__(self, updates: Updates, reference: Tensor | None) -> TokenLosses:
        return TokenLosses(-updates.logprobs)


class RefKl(LossStream):
    """Distillation on the policy's own samples: the policy gradient with log(pi_ref / pi_theta) as the advantage.

    Formula: -(c / f) sg(log pi_ref - log pi_theta) r if pi_theta - mu >= -delta, else 0; c and f are as in ce; sg(x)
    is x without gradient; r = min(pi_theta / mu, cap); the gradient of r is r times the gradient of log pi_theta, even
    if the cap is reached
    Use: to train the policy towards the reference on the policy's own episodes. In a run, the reference is the model of
    model.path. A script (docs/verl.md) can take a stronger model with the same vocabulary
    Source: the stream ref_kl of the library prime-rl, 2026; On-Policy Distillation of Language Models: Learning from
    Self-Generated Mistakes, 2023
    Caveat: it lowers KL(pi_theta || pi_ref), so it needs a reference. Corrections do not apply to it. prime-rl adds
    1e-3 log^2(pi_theta / mu) to the loss of every token, also where pi_theta - mu < -delta. Here, no such term holds
    the policy near mu.
    """

    name = "ref_kl"
    needs_reference = True
    reads_proximal = False

    delta: float = param(0.2, "largest fall of a token's probability, mu - pi_theta, at which it is trained", "(0, 1]")
    cap: float = param(1e4, "largest ratio that is used as a weight", "[1, inf]")

    def __call__(self, updates: Updates, reference: Tensor | None) -> TokenLosses:
        assert reference is not None
        policy = updates.logprobs.detach()
        fell = policy.exp() - updates.behaviour.exp() < -self.delta
        losses = -(reference - policy) * capped_ratio(updates, self.cap)
        return TokenLosses(torch.where(fell, 0.0, losses), {"low": fell})


def stream_weights(streams: Sequence[Stream], episodes: Episodes, view: PolicyTokens, reduce: Reduce) -> Tensor:
    """float64[K, M]: the weight of each token in each of the K streams, after the division that `Stream` describes."""
    weights = torch.stack([view.by_sequence(stream.weights(episodes)) for stream in streams])
    counted = [each if stream.by_weight else each != 0 for stream, each in zip(streams, weights, strict=True)]
    counts = weights.new_tensor([weights.shape[1]])
    sums = reduce(torch.cat([torch.stack([each.sum(dtype=torch.float64) for each in counted]), counts]))
    scale = torch.where(sums[:-1] > 0, sums[-1] / sums[:-1], 0.0)
    return weights * scale[:, None]


def weighted(losses: Tensor, weights: Tensor) -> Tensor:
    """float[M]: `losses` times `weights`, both float[M]. Where a weight is 0, the result is exactly 0, even if the loss
    is nan."""
    return torch.where(weights == 0, 0.0, weights * losses)
