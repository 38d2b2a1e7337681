"""Puts sequences that share a prefix into one pass, which computes the prefix once, if that saves time.

A bundle consists of consecutive sequences of a group. `schedule` treats it as one sequence, whose tokens and cost count
shared prefixes once. Larger bundles save more, and smaller ones spread better over passes and ranks, so bundles of
several sizes are tried, and the fastest schedule is taken.

The properties that `schedule.py` lists hold here, too. The only difference is the limit of a pass: it counts a shared
prefix once, since the pass computes the prefix once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from asyncrl.learner.batch.schedule import PASS_SHARE, Passes, schedule

Costs = Callable[[Sequence[int]], NDArray[np.float64]]
"""A function from the lengths of sequences to their costs."""


def schedule_shared(
    lengths: Sequence[int], shared: Sequence[int], costs_of: Costs, ranks: int, minibatches: int, limit: int
) -> list[list[Passes]]:
    """Return sequence indices, ascending, by [minibatch][rank][pass]. `shared` has, for each sequence, the number of
    tokens at its beginning that it shares with the previous sequence. A pass that has both sequences computes these
    tokens once."""
    costs = costs_of(lengths)
    whole = schedule(lengths, costs.tolist(), ranks, minibatches, limit)
    if not any(shared):
        return whole
    plan = _Plan(lengths, shared, costs, costs_of(shared), ranks, limit)
    return [plan.fastest(parts) for parts in whole]


@dataclass(frozen=True)
class _Plan:
    """Sequences with their costs and the costs of their shared prefixes."""

    lengths: Sequence[int]
    shared: Sequence[int]
    costs: NDArray[np.float64]
    saved: NDArray[np.float64]
    ranks: int
    limit: int

    def fastest(self, whole: list[Passes]) -> list[Passes]:
        """Return the passes of a minibatch by rank: `whole`, which were scheduled without regard to prefixes, or faster
        passes of the same sequences."""
        members = sorted(member for passes in whole for each in passes for member in each)
        chains = _split(members, lambda chain, member: bool(chain) and not self.shared[member])
        found, size = [whole], 1
        while size < max(map(len, chains)):
            size *= 2
            found.append(self._of_bundles([bundle for chain in chains for bundle in self._bundles(chain, size)]))
        a_pass = PASS_SHARE * self.limit * self.costs[members].sum() / sum(self.lengths[each] for each in members)
        return min(found, key=lambda parts: self._in_lockstep(parts) + a_pass * len(parts[0]))

    def _bundles(self, chain: Sequence[int], size: int) -> list[list[int]]:
        """Split a chain, whose sequences each share a prefix with the previous one, into bundles of at most `size`."""
        return _split(
            chain,
            lambda bundle, member: len(bundle) == size or self._tokens([*bundle, member]) > self.limit,
        )

    def _of_bundles(self, bundles: Sequence[Sequence[int]]) -> list[Passes]:
        lengths, costs = [self._tokens(each) for each in bundles], [self._cost(each) for each in bundles]
        (parts,) = schedule(lengths, costs, self.ranks, 1, self.limit)
        return [[sorted(member for index in each for member in bundles[index]) for each in passes] for passes in parts]

    def _tokens(self, members: Sequence[int]) -> int:
        """Return an upper bound on the number of tokens that a pass of `members`, ascending, computes."""
        return sum(self.lengths[each] for each in members) - sum(self.shared[each] for each in _with_former(members))

    def _cost(self, members: Sequence[int]) -> float:
        return float(self.costs[list(members)].sum() - self.saved[_with_former(members)].sum())

    def _in_lockstep(self, parts: list[Passes]) -> float:
        """Return the sum, over the passes, of the cost on the rank where the pass costs most."""
        return sum(max(map(self._cost, each)) for each in zip(*parts, strict=True))


def _with_former(members: Sequence[int]) -> list[int]:
    """Return the `members` whose predecessor in the plan is also a member."""
    return [member for former, member in pairwise(members) if former == member - 1]


def _split(members: Sequence[int], begins: Callable[[list[int], int], bool]) -> list[list[int]]:
    """Split `members` into parts, in order. `begins` gets the part so far and the next member, and returns True if the
    member begins another part."""
    parts: list[list[int]] = [[]]
    for member in members:
        if begins(parts[-1], member):
            parts.append([])
        parts[-1].append(member)
    return parts
