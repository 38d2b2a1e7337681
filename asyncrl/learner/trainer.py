"""The learner's math: forward passes, losses, gradients and updates of one share of a batch.

Losses come divided by counts over the global minibatch, so gradients only ever add up: over passes by accumulation,
over ranks by undoing FSDP's mean. Any split into passes and ranks therefore gives the same update, to rounding.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from asyncrl.algorithms.batch import Episodes, Totals
from asyncrl.config.schema import LearnerConfig
from asyncrl.learner.packing import Passes
from asyncrl.learner.policy import Policy
from asyncrl.learner.ports import Algorithm
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.share import Share

logger = logging.getLogger(__name__)


LOSS = "learner/loss"


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What leads to one update: this rank's passes, and the counts over all ranks' sequences."""

    passes: Passes
    totals: Totals


@dataclass(slots=True)
class Result:
    """What one learner step did, the same on every rank: the loss and gradient norm of each update, how many updates
    were left out because the gradient was not finite or nothing was left to learn from, and the algorithm's numbers."""

    loss: float = 0.0
    norms: list[float] = field(default_factory=list)
    skipped: int = 0
    empty: int = 0
    summary: dict[str, float] = field(default_factory=dict)


class Sums:
    """Running totals of named tensors."""

    def __init__(self) -> None:
        self.total: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().double()
            self.total[name] = self.total[name] + value if name in self.total else value


class Trainer:
    """Trains `policy` with `algorithm`. Every method is called by all ranks alike, with as many passes on each."""

    def __init__(
        self,
        config: LearnerConfig,
        ranks: Ranks,
        algorithm: Algorithm,
        policy: Policy,
        reference: Policy | None,
        stop: threading.Event,
    ) -> None:
        self.policy = policy
        self.optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._config = config
        self._ranks = ranks
        self.algorithm = algorithm
        self._reference = reference
        self._stop = stop

    @property
    def parts(self) -> dict[str, tuple[nn.Module, Optimizer]]:
        """What is trained: modules with their optimisers, by name."""
        return {"policy": (self.policy, self.optimizer)}

    def learning_rate(self, step: int) -> float:
        """That of a learner step: linear warm-up, then constant."""
        warmup = self._config.warmup_steps
        return self._config.lr * min(1.0, (step + 1) / warmup if warmup else 1.0)

    def prepare(self, share: Share, episodes: Episodes, minibatches: Sequence[Minibatch]) -> Share:
        """The share with everything that is fixed for the step: proximal and reference log-probs, advantages."""
        tokens = share.tokens
        if self.algorithm.needs_proximal:
            tokens = replace(tokens, proximal=self._logprobs(self.policy, share, minibatches))
        if self._reference is not None:
            tokens = replace(tokens, reference=self._logprobs(self._reference, share, minibatches))
        return replace(share, tokens=self.algorithm.prepare(episodes, tokens, self._ranks.sum))

    @torch.no_grad()
    def _logprobs(self, policy: Policy, share: Share, minibatches: Sequence[Minibatch]) -> Tensor:
        result = torch.zeros_like(share.tokens.behaviour)
        for members in (members for minibatch in minibatches for members in minibatch.passes):
            self._ranks.leave_if(self._stop.is_set())
            rows = share.rows(members)
            logprobs, _ = policy(share.packed(members, rows))
            if members:
                result[rows] = logprobs
        return result

    def learn(self, step: int, share: Share, minibatches: Sequence[Minibatch]) -> Result:
        """One update for each minibatch. Raises StoppedError between two passes when asked to stop."""
        result, sums = Result(), Sums()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        for minibatch in minibatches:
            for members in minibatch.passes:
                self._ranks.leave_if(self._stop.is_set())
                sums.add(self._backward(share, members, minibatch.totals))
            self._update(result)
        total = self._ranks.merge(sums.total)
        result.loss = float(total.pop(LOSS)) / len(minibatches)
        result.summary = self.algorithm.summary(total)
        return result

    def _backward(self, share: Share, members: Sequence[int], totals: Totals) -> dict[str, Tensor]:
        rows = share.rows(members)
        logprobs, entropy = self.policy(share.packed(members, rows), self.algorithm.needs_entropy)
        if not members:
            (logprobs.sum() * 0).backward()
            return {}
        loss, sums = self.algorithm.loss(logprobs, share.tokens.select(rows), totals, entropy)
        (loss * self._ranks.size).backward()
        return {**sums, LOSS: loss}

    def _update(self, result: Result) -> None:
        parameters = [each for each in self.policy.parameters() if each.grad is not None]
        total = get_total_norm([each.grad for each in parameters if each.grad is not None])
        norm = total.full_tensor() if isinstance(total, DTensor) else total
        result.norms.append(norm.item())
        if not torch.isfinite(norm):
            result.skipped += 1
            logger.warning("the gradient is not finite: this update is left out")
        elif norm == 0:
            # AdamW would move the weights by its momentum all the same.
            result.empty += 1
            logger.warning("nothing to learn from in this minibatch: this update is left out")
        else:
            clip_grads_with_norm_(parameters, self._config.max_grad_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
