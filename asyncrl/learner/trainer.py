"""The learner's math: forward passes, losses, gradients and updates of one share of a batch.

Losses come divided by counts over the global minibatch, so gradients only ever add up: over passes by accumulation,
over ranks by undoing FSDP's mean. Any split into passes and ranks therefore gives the same update, to rounding.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Episodes, Totals
from asyncrl.learner.backbone import Packed
from asyncrl.learner.critic import Critic, critic_summary
from asyncrl.learner.optimised import Optimised
from asyncrl.learner.packing import Passes
from asyncrl.learner.policy import Policy
from asyncrl.learner.ports import Algorithm
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.share import Share

LOSS = "learner/loss"


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What leads to one update: this rank's passes, and the counts over all ranks' sequences."""

    passes: Passes
    totals: Totals


@dataclass(slots=True)
class Result:
    """What one learner step did, the same on every rank: the mean loss of its updates, the gradient norm of each, and
    the numbers of algorithm and critic."""

    loss: float = 0.0
    norms: list[float] = field(default_factory=list)
    summary: dict[str, float] = field(default_factory=dict)

    @property
    def skipped(self) -> int:
        """Updates left out because the gradient was not finite."""
        return sum(not math.isfinite(norm) for norm in self.norms)

    @property
    def empty(self) -> int:
        """Updates left out because nothing was left to learn from."""
        return self.norms.count(0.0)


class Sums:
    """Running totals of named tensors."""

    def __init__(self) -> None:
        self.total: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().double()
            self.total[name] = self.total[name] + value if name in self.total else value


class Trainer:
    """Trains `policy` and, where there are such, `critic` and the process model `implicit` with `algorithm`.

    Every method is called by all ranks alike with as many passes on each, and raises StoppedError on all of them
    between two passes once `stop` is set on one.
    """

    def __init__(
        self,
        ranks: Ranks,
        algorithm: Algorithm,
        policy: Optimised[Policy],
        critic: Optimised[Critic] | None,
        reference: Policy | None,
        stop: threading.Event,
        implicit: Optimised[Policy] | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.policy = policy
        self.critic = critic
        self.implicit = implicit
        self._ranks = ranks
        self._reference = reference
        self._stop = stop

    @property
    def parts(self) -> dict[str, Optimised[Any]]:
        """What is trained, by name."""
        found = {"policy": self.policy, "critic": self.critic, "implicit": self.implicit}
        return {name: part for name, part in found.items() if part is not None}

    def prepare(self, share: Share, episodes: Episodes, minibatches: Sequence[Minibatch]) -> Share:
        """The share with everything that is fixed for the step: log-probs, values, advantages."""

        def of_all(forward: Callable[[Packed], Tensor]) -> Tensor:
            return self._forward(forward, share, minibatches)

        tokens, policy, reference, critic = share.tokens, self.policy.module, self._reference, self.critic
        implicit = self.implicit
        if self.algorithm.needs_proximal:
            tokens = replace(tokens, proximal=of_all(lambda packed: policy(packed)[0]))
        if reference is not None:
            tokens = replace(tokens, reference=of_all(lambda packed: reference(packed)[0]))
        if critic is not None:
            tokens = replace(tokens, values=of_all(critic.module))
        if implicit is not None:
            assert tokens.reference is not None
            tokens = replace(tokens, implicit=of_all(lambda packed: implicit.module(packed)[0]) - tokens.reference)
        return replace(share, tokens=self.algorithm.prepare(episodes, tokens, self._ranks.sum))

    @torch.no_grad()
    def _forward(self, forward: Callable[[Packed], Tensor], share: Share, minibatches: Sequence[Minibatch]) -> Tensor:
        result = torch.zeros_like(share.tokens.behaviour)
        for minibatch in minibatches:
            for members, rows in self._passes(share, minibatch):
                values = forward(share.packed(members, rows))
                if members:
                    result[rows] = values
        return result

    def _passes(self, share: Share, minibatch: Minibatch) -> Iterator[tuple[list[int], Tensor]]:
        for members in minibatch.passes:
            self._ranks.leave_if(self._stop.is_set())
            yield members, share.rows(members)

    def learn(self, step: int, share: Share, episodes: Episodes, minibatches: Sequence[Minibatch]) -> Result:
        """One update for each minibatch."""
        result, sums = Result(), Sums()
        for minibatch in minibatches:
            for members, rows in self._passes(share, minibatch):
                packed = share.packed(members, rows)
                sums.add(self._policy_pass(share, packed, rows, minibatch.totals))
                if self.critic is not None:
                    sums.add(self._critic_pass(self.critic, share, packed, rows, minibatch.totals))
                if self.implicit is not None:
                    sums.add(self._implicit_pass(self.implicit, share, episodes, packed, rows, minibatch.totals))
            result.norms.append(self.policy.update(step))
            if self.critic is not None:
                result.summary["value/grad_norm"] = self.critic.update(step)
            if self.implicit is not None:
                result.summary["implicit/grad_norm"] = self.implicit.update(step)
        total = self._ranks.merge(sums.total)
        result.loss = float(total.pop(LOSS)) / len(minibatches)
        result.summary |= self.algorithm.summary(total) | critic_summary(total)
        return result

    def _policy_pass(self, share: Share, packed: Packed, rows: Tensor, totals: Totals) -> dict[str, Tensor]:
        logprobs, entropy = self.policy.module(packed, self.algorithm.needs_entropy)
        if not len(rows):
            return self._nothing(logprobs)
        loss, sums = self.algorithm.loss(logprobs, share.tokens.select(rows), totals, entropy)
        (loss * self._ranks.size).backward()
        return {**sums, LOSS: loss}

    def _critic_pass(
        self, critic: Optimised[Critic], share: Share, packed: Packed, rows: Tensor, totals: Totals
    ) -> dict[str, Tensor]:
        values = critic.module(packed)
        if not len(rows):
            return self._nothing(values)
        loss, sums = self.algorithm.value_loss(values, share.tokens.select(rows), totals)
        (loss * self._ranks.size).backward()
        return sums

    def _implicit_pass(
        self,
        implicit: Optimised[Policy],
        share: Share,
        episodes: Episodes,
        packed: Packed,
        rows: Tensor,
        totals: Totals,
    ) -> dict[str, Tensor]:
        logprobs, _ = implicit.module(packed)
        if not len(rows):
            return self._nothing(logprobs)
        tokens = share.tokens.select(rows)
        assert tokens.reference is not None
        loss, sums = self.algorithm.implicit_loss(logprobs - tokens.reference, episodes.outcome, tokens, totals)
        (loss * self._ranks.size).backward()
        return sums

    def _nothing(self, values: Tensor) -> dict[str, Tensor]:
        """The backward pass of a dummy: collectives meet those of other ranks, gradients stay as they are."""
        (values.sum() * 0).backward()
        return {}
