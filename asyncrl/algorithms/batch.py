"""The input of the algorithms: the episodes of the global batch, and the packed tokens of some of its sequences.

When these objects are constructed, shapes and dtypes are checked, so that no tensor is broadcast by accident. If a
shape or dtype is wrong, an InvariantError names the field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.group_statistics import Groups
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.errors import InvariantError

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor elementwise over the learner's ranks."""


class MissingScoreError(InvariantError):
    """A part of the algorithm reads a named score that the episodes do not have."""


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """Facts about the S sequences of the global batch, in the order of the batch plan. They are the same on every rank.

    - `group` int64[S]: the index of the sequence's group, counted from 0 without gaps
    - `reward` float32[S]: the reward of the labels
    - `outcome` float32[S]: the outcome of the labels, which says if the answer is right
    - `lengths` int64[S]: the number of policy tokens
    - `extra`: the named scores float32[S] that parts of the algorithm read (`Part.reads`)
    - `greedy` bool[S]: true for members that were sampled greedily as a baseline
    - `demonstrated` bool[S]: true for demonstrations. None: the batch has none
    - `version`: the version of the policy that the learner trains
    - `priority` float32[S]: importance weights, which make up for a sampler that prefers some groups

    The batch has K process scores (K = 0 without a process model), ordered by sequence and step:

    - `step_scores` float32[K]: the scores
    - `step_sequence` int64[K]: the sequence of each step
    - `step_end` int64[K]: the exclusive end of the step's span among the sequence's tokens
    """

    group: Tensor
    reward: Tensor
    outcome: Tensor
    lengths: Tensor
    step_scores: Tensor
    step_sequence: Tensor
    step_end: Tensor
    extra: Mapping[str, Tensor]
    greedy: Tensor | None = None
    demonstrated: Tensor | None = None
    version: int | None = None
    priority: Tensor | None = None

    def __post_init__(self) -> None:
        _check_shapes(self, "group", ("reward", "outcome", "lengths", "greedy", "demonstrated", "priority"))
        _check_shapes(self, "step_scores", ("step_sequence", "step_end"))
        _check_dtypes(self, torch.int64, ("group", "lengths", "step_sequence", "step_end"))
        _check_dtypes(self, torch.bool, ("greedy", "demonstrated"))
        for name, scores in self.extra.items():
            _require(scores.shape == self.group.shape, f"extra[{name!r}]", scores, f"{list(self.group.shape)} (group)")

    @property
    def named(self) -> Mapping[str, Tensor]:
        """All scores of the sequences by name: those in `extra`, and `outcome` and `reward`."""
        return {**self.extra, "outcome": self.outcome, "reward": self.reward}

    def score(self, name: str) -> Tensor:
        """[S]: the score of this name. Raises MissingScoreError: the episodes do not have it."""
        if name not in self.named:
            raise MissingScoreError(
                f"the score {name} is not among {sorted(self.named)}: a part must list in its `reads` the scores that "
                "it uses, and every episode's labels must have them"
            )
        return self.named[name]

    @property
    def count(self) -> int:
        """S, the number of sequences in the global batch."""
        return self.group.numel()

    @property
    def samples(self) -> Tensor:
        """bool[S]: true for the sequences that were drawn from the policy. It is false for demonstrations and for
        greedily decoded sequences."""
        others = [each for each in (self.demonstrated, self.greedy) if each is not None]
        return ~torch.stack([torch.zeros_like(self.group, dtype=torch.bool), *others]).any(0)

    @property
    def groups(self) -> Groups:
        return Groups.of(self.group)


@dataclass(frozen=True, slots=True, eq=False)
class Centres:
    """Means float64[] over the policy tokens of the global batch, around which variances are summed."""

    # Without a centre, a variance would be the mean square minus the squared mean. For values far from 0, this
    # difference loses all digits.

    advantages: Tensor
    returns: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """N packed tokens. In every tensor [N], entry t belongs to token t, as predicted from the tokens before it.

    - `sequence` int64[N]: the index of the token's sequence in the global batch
    - `position` int64[N]: the token's index in its own sequence, counting up by one
    - `mask` bool[N]: true on policy tokens
    - `behaviour` float32[N]: the log-prob with which the token was sampled
    - `versions` int64[N]: the version that sampled the token
    - `restricted` bool[N]: true if a grammar restricted the token (see restricted_tokens.py). None: no token was
      restricted
    - `demonstrated` bool[N]: true on the tokens of demonstrations (see demonstrations.py). None: there are none
    - `old` bool[N]: true on tokens that are too old to be trained, and on the tokens of greedily sampled members (see
      old_tokens.py). None: there are none

    The learner sets these during training:

    - `proximal` float32[N]: the log-prob at the start of the learner step
    - `reference` float32[N]: the log-prob under the reference policy
    - `values` float32[N]: the critic's value of the state before the token
    - `measured` bool[N]: true on the tokens whose entropy is computed for metrics, if the loss does not need entropies.
      None: the entropy of all tokens is computed
    - `implicit` float32[N]: log(pi_phi / pi_ref), the reward that an implicit process model pi_phi gives to the token
    - `collisions` float32[N]: the sum over the vocabulary of pi_prox^2, the probability that two draws of the token are
      the same

    `Algorithm.prepare` adds these:

    - `advantages` float32[N]
    - `returns` float32[N]: the critic's targets
    - `weights` float32[N]: importance weights
    - `rejected` int32[N]: bit k is set where the k-th correction drops the token
    - `selected` bool[N] or float[N]: how the loss treats the token (`Loss.select`)
    - `lag` int64[N]: the learner's version minus the token's
    - `streams` float32[N, K]: the token's weight in each of the K loss streams
    - `centres`: the means of the advantages and returns of the whole batch

    `view` is the selection of these tokens that `PolicyTokens.of` returns. It may be computed in advance, so that the
    host need not wait for the GPU, or narrowed, as by `only_trained`. None: `PolicyTokens.of` selects all policy
    tokens.
    """

    sequence: Tensor
    position: Tensor
    mask: Tensor
    behaviour: Tensor
    versions: Tensor
    restricted: Tensor | None = None
    demonstrated: Tensor | None = None
    old: Tensor | None = None
    proximal: Tensor | None = None
    reference: Tensor | None = None
    advantages: Tensor | None = None
    values: Tensor | None = None
    implicit: Tensor | None = None
    collisions: Tensor | None = None
    returns: Tensor | None = None
    weights: Tensor | None = None
    rejected: Tensor | None = None
    selected: Tensor | None = None
    lag: Tensor | None = None
    streams: Tensor | None = None
    centres: Centres | None = None
    measured: Tensor | None = None
    view: PolicyTokens | None = None

    def __post_init__(self) -> None:
        _check_shapes(self, "sequence", [name for name, _ in self.tensors() if name != "streams"])
        _check_dtypes(self, torch.int64, ("sequence", "position", "versions", "lag"))
        _check_dtypes(self, torch.bool, ("mask", "restricted", "demonstrated", "old", "measured"))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are not None, by name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value

    def select(self, index: Tensor) -> Tokens:
        """The tokens at `index` int64[n], in that order. The order must keep the tokens of a sequence together."""
        selected: dict[str, Any] = {name: value[index] for name, value in self.tensors()}
        return replace(self, view=None, **selected)


@dataclass(frozen=True, slots=True, eq=False)
class Totals:
    """The numbers of policy tokens, sequences and groups in the global minibatch, by which losses are normalised.

    Old tokens (see old_tokens.py) do not count. Sequences and groups that have only old policy tokens do not count
    either. Counts are taken before any rejection. group_tokens int64[S]: for each sequence of the batch, the number of
    policy tokens that its group has in the minibatch; None: the groups are not known.
    """

    tokens: int
    sequences: int
    groups: int = 0
    group_tokens: Tensor | None = None

    @classmethod
    def of(cls, sampled: Sequence[int], group: Sequence[Hashable], members: Sequence[int]) -> Totals:
        """The totals of the sequences with the indices `members`. For each sequence of the batch, `sampled` has the
        number of policy tokens that are trained, and `group` has the group."""
        tokens: Counter[Hashable] = Counter()
        for member in members:
            tokens[group[member]] += sampled[member]
        groups = sum(count > 0 for count in tokens.values())
        of_groups = torch.tensor([tokens[each] for each in group], dtype=torch.int64)
        sequences = sum(sampled[member] > 0 for member in members)
        return cls(tokens.total(), sequences, groups, of_groups)

    def of_pass(self, owner: Tensor) -> Totals:
        """The totals for a pass over R sequences. `owner` int64[R] has the index of each sequence in the batch. In the
        result, `group_tokens` has only these sequences."""
        return self if self.group_tokens is None else replace(self, group_tokens=self.group_tokens[owner])


def _check_shapes(owner: Episodes | Tokens, first: str, names: tuple[str, ...] | list[str]) -> None:
    shape = getattr(owner, first).shape
    _require(len(shape) == 1, first, getattr(owner, first), "one dimension")
    for name in names:
        value = getattr(owner, name)
        _require(value is None or value.shape == shape, name, value, f"{list(shape)}, as {first} has")


def _check_dtypes(owner: Episodes | Tokens, dtype: torch.dtype, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and value.dtype != dtype:
            raise InvariantError(f"{name} is {value.dtype}; it must be {dtype}")


def _require(condition: bool, name: str, value: Tensor, needed: str) -> None:
    if not condition:
        raise InvariantError(f"{name} has shape {list(value.shape)}; it must have {needed}")
