"""The part of a batch that one rank trains: for each update, the passes of this rank, and the numbers of tokens,
sequences and groups on all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.algorithms.batch import Totals
from asyncrl.learner.batch.local_batch import LocalBatch
from asyncrl.learner.batch.schedule import Passes


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The part of a batch that leads to one update: the passes of this rank, or of its context group (the ranks that
    divide the tokens of a pass), and the `totals` over all ranks' sequences."""

    passes: Passes
    totals: Totals


@dataclass(frozen=True, slots=True, eq=False)
class ImitationBatch:
    """The demonstrations of a step.

    - `batch`: this rank's tokens.
    - `passes`: this rank's passes, for each update.
    - `tokens`: the number of tokens that all ranks together learn, for each update.
    - `weight`: the weight of the imitation loss.
    - `count`: the number of demonstrations.
    """

    batch: LocalBatch
    passes: Sequence[Passes]
    tokens: Sequence[int]
    weight: float
    count: int
