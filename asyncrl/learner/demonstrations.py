"""Chooses the demonstrations that a step learns, and builds this rank's part of them.

Each epoch trains the demonstrations in an order of its own, which depends only on the run's seed and the epoch. A
checkpoint keeps the position in this order. A step's demonstrations depend only on the position at which the step
begins. These properties are tested:
- Every demonstration comes once in each epoch, and a step begins after the last demonstration of the step before.
- All ranks choose the same demonstrations, and have the same number of passes in each update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import LearnerConfig, SftConfig
from asyncrl.data.rendered import RenderedDemonstrations
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner.batch.fetching import PackedModel
from asyncrl.learner.batch.local_batch import pack_demonstrations
from asyncrl.learner.batch.minibatch import ImitationBatch
from asyncrl.learner.batch.prefixes import sharing_of
from asyncrl.learner.batch.schedule import Passes, schedule
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.flops import ForwardFlops
from asyncrl.observe.metrics import Value


def sft_weight(config: SftConfig, step: int, total_steps: int) -> float:
    """Return the weight that the loss of demonstrations has at a learner step."""
    done = min(1.0, step / (config.steps or total_steps))
    falling = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.schedule]
    return config.weight * falling


class DemonstrationOrder:
    """The order of `count` demonstrations, epoch after epoch."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._permutation = lru_cache(maxsize=2)(self._make)

    def at(self, position: int) -> int:
        """Return the index of the demonstration at a position. Positions are counted over all epochs."""
        epoch, within = divmod(position, self._count)
        return int(self._permutation(epoch)[within])

    def _make(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(self._count)


class DemonstrationFeed:
    """Builds the imitation batches of one rank. Raises ConfigError: the tokenizer has ids that the policy lacks."""

    def __init__(
        self, rendered: RenderedDemonstrations, seed: int, ranks: Ranks, policy: PackedModel, flops: ForwardFlops
    ) -> None:
        if (largest := int(rendered.tokens.max())) >= policy.vocabulary:
            raise ConfigError(
                f"a demonstration has the token id {largest}, and the policy has {policy.vocabulary} ids: "
                "the tokenizer of model.path belongs to another model"
            )
        self.rendered = rendered
        self._order = DemonstrationOrder(len(rendered), seed)
        self._ranks = ranks
        self._policy = policy
        self._flops = flops

    def resume(self, progress: Progress) -> None:
        """Continue from a checkpoint. Raises CheckpointError: the demonstrations have changed since the run trained
        some of them."""
        if progress.demonstrations and progress.demonstrations_digest != self.rendered.digest:
            raise CheckpointError(
                f"the run of this checkpoint has trained {progress.demonstrations} demonstrations, whose files have "
                "changed since then: restore the files, or choose another run.name"
            )
        progress.demonstrations_digest = self.rendered.digest

    def values(self, position: int) -> dict[str, Value]:
        """Return the epoch at a position, and how many demonstrations were cut or left out because they were too
        long."""
        return {
            "sft/epoch": position / len(self.rendered),
            "sft/cut": float(self.rendered.cut),
            "sft/left_out": float(self.rendered.left_out),
        }

    def batch_of_step(
        self, position: int, sft: SftConfig, learner: LearnerConfig, step: int, updates: int
    ) -> ImitationBatch | None:
        """Build the batch of demonstrations that a step trains in addition to its episodes. Each of the step's
        `updates` gets an equal share. Returns None if the weight of the demonstrations' loss is 0."""
        weight = sft_weight(sft, step, learner.total_steps)
        if weight <= 0:
            return None
        if sft.tokens is None:
            # Rounded first: 0.07 * 100 is a little more than 7.
            members = self.next(position, math.ceil(round(sft.share * learner.batch_size, 6)))
        else:
            members = self._next_tokens(position, sft.tokens)
        return self.build(members, learner, updates, weight)

    def next(self, position: int, count: int) -> list[int]:
        """Return the indices of `count` demonstrations, from a position on."""
        return [self._order.at(each) for each in range(position, position + count)]

    def _next_tokens(self, position: int, tokens: int) -> list[int]:
        """Return the indices of demonstrations from a position on: as few as possible that together have at least
        `tokens` tokens to learn."""
        found: list[int] = []
        while tokens > 0:
            found.append(self._order.at(position + len(found)))
            tokens -= int(self.rendered.trained[found[-1]])
        return found

    def build(
        self, members: Sequence[int], learner: LearnerConfig, updates: int = 1, weight: float = 1.0
    ) -> ImitationBatch:
        """Build the batch of the demonstrations `members`. Each update takes an equal share of them, in order."""
        lengths = self.rendered.lengths[list(members)].tolist()
        costs = self._flops(lengths).tolist()
        bounds = [len(members) * number // updates for number in range(updates + 1)]
        passes, tokens = [], []
        for start, end in pairwise(bounds):
            passes.append(self._passes(lengths[start:end], costs[start:end], learner.micro_tokens, start))
            tokens.append(int(self.rendered.trained[list(members[start:end])].sum()))
        own = sorted(index for each in passes for one in each for index in one)
        rows = [self.rendered.row(members[index]) for index in own]
        device = self._ranks.device
        sharing = sharing_of(learner.shared_prefixes, self._policy.shares_prefixes, device.type)
        return ImitationBatch(pack_demonstrations(own, rows, device, sharing), passes, tokens, weight, len(members))

    def _passes(self, lengths: Sequence[int], costs: Sequence[float], limit: int, first: int) -> Passes:
        """Schedule the passes of this rank, or of the ranks with which it divides the tokens of a pass, in an update
        whose first demonstration has the index `first`."""
        if not lengths:
            return []
        ranks = self._ranks
        (parts,) = schedule(lengths, costs, ranks.pass_groups, 1, limit * ranks.context_size)
        return [[first + index for index in members] for members in parts[ranks.pass_group]]
