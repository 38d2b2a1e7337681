"""What the algorithms are given: the episodes of the global batch, and packed tokens of some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """Facts about the S sequences of the global batch in plan order, the same on every rank.

    group int64[S], dense index of the sequence's group; reward float32[S], the shaped scalar; outcome float32[S], the
    verifier's own; lengths int64[S], policy tokens; step_scores float32[K], step_sequence int64[K], step_end int64[K]:
    the K process scores of the batch, whose sequence each is, and the exclusive end of its span among that sequence's
    tokens (K = 0 without a process model); extra holds named scores float32[S].
    """

    group: Tensor
    reward: Tensor
    outcome: Tensor
    lengths: Tensor
    step_scores: Tensor
    step_sequence: Tensor
    step_end: Tensor
    extra: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """N packed tokens. The tensors [N] line up: entry t speaks of token t as predicted from those before it.

    sequence int64[N]; position int64[N], the token's index in its own sequence; mask bool[N]; behaviour float32[N], the
    log-prob when sampled; versions int64[N]. Filled in as training goes on: proximal float32[N], log-prob at the start
    of the learner step; reference float32[N] or None; advantages float32[N].
    """

    sequence: Tensor
    position: Tensor
    mask: Tensor
    behaviour: Tensor
    versions: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None
    advantages: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the global minibatch before any rejection, by which losses are normalised: policy tokens, and
    sequences that have any."""

    tokens: int
    sequences: int
