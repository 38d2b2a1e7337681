"""Assigns sequences to the forward passes of each rank.

Ranks wait for each other in every layer. So the time of a minibatch is its cost in lockstep: the sum over passes of the
largest cost on a rank.

`schedule` needs only lengths and costs, so every rank gets the same schedule. These properties are tested:
- Every sequence is in exactly one pass of one rank of one minibatch. No sequence is split.
- The split into minibatches does not depend on the ranks: minibatch m holds consecutive sequences of the plan.
- All ranks have the same number of passes in a minibatch, so that their collectives match. A pass may be empty.
- A pass has at most `limit` tokens, unless it consists of a single longer sequence.
- For at most `COMPARED` sequences, a schedule has no more passes and no larger cost in lockstep than a reference
  schedule. Its costliest rank costs no more than in the reference, or at most `EVEN` times the mean. The reference
  divides sequences over ranks by Karmarkar-Karp, and over the passes of a rank by first-fit-decreasing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from asyncrl.learner.batch.bins import (
    Bins,
    even_out,
    fill_to_targets,
    first_fit_decreasing,
    fullest_bins,
    karmarkar_karp,
)

Passes = list[list[int]]

COMPARED = 256
"""The largest number of sequences in a minibatch for which several schedules are compared. With more sequences only one
schedule is made, by `_of_many`, since it is nearly ideal."""
EVEN = 1.02
"""Ranks whose costs are at most this many times the mean count as equal."""
PASS_SHARE = 1 / 64
"""The cost of a pass in addition to the cost of its sequences, as a share of the cost of `limit` average tokens."""


def schedule(
    lengths: Sequence[int], costs: Sequence[float], ranks: int, minibatches: int, limit: int
) -> list[list[Passes]]:
    """Return sequence indices, ascending, by [minibatch][rank][pass]. `costs` has the costs of the sequences, in any
    unit. A minibatch that would be empty is left out.
    """
    total = len(lengths)
    bounds = [total * m // minibatches for m in range(minibatches + 1)]
    spans = [slice(start, end) for start, end in pairwise(bounds) if start < end]
    found = []
    for span in spans:
        # A sequence above the limit takes a whole pass.
        task = _Minibatch([min(each, limit) for each in lengths[span]], costs[span], ranks, limit)
        parts = task.alone() if ranks == 1 else task.best()
        found.append([[sorted(span.start + index for index in each) for each in passes] for passes in parts])
    return found


@dataclass(frozen=True)
class _Minibatch:
    """The sequences of a minibatch, by index. `ranks` ranks divide them into passes of at most `limit` tokens."""

    lengths: Sequence[int]
    costs: Sequence[float]
    ranks: int
    limit: int

    @cached_property
    def _all(self) -> list[int]:
        """Every sequence, the costliest first."""
        order: list[int] = np.argsort(-np.array(self.costs), kind="stable").tolist()
        return order

    def alone(self) -> list[Passes]:
        """Return the passes for a single rank, about as few as possible."""
        if len(self.lengths) > COMPARED:
            return self._of_many([list(self._all)])
        passes = first_fit_decreasing(self.lengths, self._all, self.limit)
        if len(passes) > self._fewest():
            passes = min(passes, fullest_bins(self.lengths, self._all, self.limit), key=len)
        return [passes]

    def best(self) -> list[Passes]:
        """Return the fastest of several schedules."""
        if len(self.lengths) > COMPARED:
            shards = fill_to_targets(self.lengths, self.costs, self._all, [0.0] * self.ranks, sum(self.lengths))
            assert shards is not None
            return self._of_many(shards)
        equal = [set(shard) for shard in karmarkar_karp(self.costs, self._all, self.ranks)]
        shards = [[index for index in self._all if index in shard] for shard in equal]
        packed = [first_fit_decreasing(self.lengths, shard, self.limit) for shard in shards]
        most = max(len(each) for each in packed)
        reference = [each + [[] for _ in range(most - len(each))] for each in packed]
        passes, rank, lockstep = self._measured(reference)
        largest = max(rank, EVEN * sum(self.costs) / self.ranks)
        each_pass = PASS_SHARE * self.limit * sum(self.costs) / sum(self.lengths)
        best, least = reference, lockstep + each_pass * passes
        for parts in self._candidates(reference, shards):
            measured = self._measured(parts)
            time = measured[2] + each_pass * measured[0]
            if measured[0] <= passes and measured[1] <= largest and measured[2] <= lockstep and time < least:
                best, least = parts, time
        return best

    def _candidates(self, reference: list[Passes], shards: Bins) -> Iterator[list[Passes]]:
        yield self._evened(reference)
        yield self._dealt(sorted(fullest_bins(self.lengths, self._all, self.limit), key=self._cost, reverse=True))
        for count in range(self._fewest(), len(reference[0]) + 1):
            targets = [target for target in self._targets(count) for _ in range(self.ranks)]
            bins = fill_to_targets(self.lengths, self.costs, self._all, targets, self.limit)
            if bins is not None:
                yield self._dealt(bins)
            if (aligned := self._aligned(shards, count)) is not None:
                yield aligned
                yield self._evened(aligned)

    def _of_many(self, shards: Bins) -> list[Passes]:
        count = self._fewest()
        while (aligned := self._aligned(shards, count)) is None:
            count += 1
        return aligned

    def _aligned(self, shards: Bins, count: int) -> list[Passes] | None:
        """Divide each rank's shard into `count` passes that cost about the same on all ranks. Returns None if a
        sequence fits into no pass."""
        targets = self._targets(count)
        parts = [fill_to_targets(self.lengths, self.costs, shard, targets, self.limit) for shard in shards]
        passes = [each for each in parts if each is not None]
        return passes if len(passes) == self.ranks else None

    def _dealt(self, bins: Bins) -> list[Passes]:
        """Assign one bin to each rank in every pass: the costliest bin to the rank with the least cost so far."""
        bins = bins + [[] for _ in range(-len(bins) % self.ranks)]
        parts: list[Passes] = [[] for _ in range(self.ranks)]
        totals = [0.0] * self.ranks
        for start in range(0, len(bins), self.ranks):
            evened = even_out(self.lengths, self.costs, bins[start : start + self.ranks], self.limit)
            ranks = sorted(range(self.ranks), key=totals.__getitem__)
            for rank, members in zip(ranks, sorted(evened, key=self._cost, reverse=True), strict=True):
                parts[rank].append(members)
                totals[rank] += self._cost(members)
        return parts

    def _evened(self, parts: list[Passes]) -> list[Passes]:
        """Even out the cost of each pass over the ranks: within a pass, ranks give or swap sequences."""
        columns = [even_out(self.lengths, self.costs, list(each), self.limit) for each in zip(*parts, strict=True)]
        return [list(each) for each in zip(*columns, strict=True)]

    def _targets(self, count: int) -> list[float]:
        """Return the target cost of each pass on one rank, the costliest first. A target is no less than the cost of
        the pass's costliest sequence.
        """
        leads, left, targets = self._all[:: self.ranks], sum(self.costs), []
        for index in range(count):
            lead = self.costs[leads[index]] if index < len(leads) else 0.0
            targets.append(max(lead, left / (self.ranks * (count - index))))
            left = max(0.0, left - self.ranks * targets[-1])
        return targets

    def _fewest(self) -> int:
        """Return a lower bound on the number of passes of any schedule."""
        halves = sum(2 * each > self.limit for each in self.lengths)
        return -(-max(-(-sum(self.lengths) // self.limit), halves) // self.ranks)

    def _measured(self, parts: list[Passes]) -> tuple[int, float, float]:
        """Return the number of passes, the largest cost of a rank, and the cost in lockstep."""
        costs = [[self._cost(each) for each in passes] for passes in parts]
        return len(parts[0]), max(map(sum, costs)), sum(map(max, zip(*costs, strict=True)))

    def _cost(self, members: Sequence[int]) -> float:
        return sum(self.costs[index] for index in members)
