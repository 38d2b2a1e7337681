"""The base classes of advantage estimators, and the rollouts that they read.

An estimator sees the M policy tokens of this rank (`view`) and the S episodes of the global batch. A statistic over
tokens is summed over ranks by `reduce`, so that every rank uses the same value.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Episodes, Reduce, Tokens
from asyncrl.algorithms.linear_scan import linear_scan
from asyncrl.algorithms.log_ratios import clamp_log
from asyncrl.algorithms.parts import Part, param
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.errors import InvariantError


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """The rewards, tokens and values that an estimator reads.

    - `episodes`: the facts of the global batch. `episodes.reward` [S] is the whole reward, including token penalties.
    - `tokens`, `view`: the packed tokens of this rank, and the selection of their policy tokens.
    - `final` [S]: the share of the reward that goes to the last policy token.
    - `penalty` [M]: the cost of each token (a KL in the reward), or None.
    - `values` [M]: the critic's values, or None.
    - `reduce`: sums over the ranks.
    """

    episodes: Episodes
    tokens: Tokens
    view: PolicyTokens
    final: Tensor
    penalty: Tensor | None
    values: Tensor | None
    reduce: Reduce

    @property
    def ratio(self) -> Tensor:
        """float[M]: pi_prox / mu, whose log is clamped to +-20."""
        assert self.tokens.proximal is not None
        return clamp_log(self.view.take(self.tokens.proximal).sub_(self.view.take(self.tokens.behaviour))).exp_()

    def differences(self, values: Tensor, targets: Tensor, gamma: float, step_weight: float) -> Tensor:
        """float[M]: r_t + gamma target_{t+1} - V_t. Computed in one buffer, because allocating further memory would
        take longer than the sums."""
        return self.rewards(step_weight).add_(self.view.shift(targets), alpha=gamma).sub_(values)

    def spread(self, values: Tensor) -> Tensor:
        """[S] to float[M]: each sequence's value on all of its policy tokens."""
        return self.view.by_sequence(values.to(self.dtype))

    def rewards(self, step_weight: float) -> Tensor:
        """float[M]: the reward of each token.

        It is the final reward on the last token, plus the weighted score of a step on the step's last token, minus the
        token's penalty.
        """
        rewards = self.zeros()
        present = self.view.sequences.lengths > 0
        rewards[self.view.sequences.last] = self.final[self.view.owner][present].to(rewards.dtype)
        if step_weight:
            rewards += step_weight * self.at_steps(self.episodes.step_scores)
        return rewards if self.penalty is None else rewards - self.penalty

    def at_steps(self, scores: Tensor) -> Tensor:
        """[K] to [M]: each step's score at the step's last policy token, 0 at all other tokens."""
        step, token = step_tokens(self.episodes, self.tokens, self.view)
        return self.zeros().index_add_(0, token, scores[step].to(self.dtype))

    def after(self, scores: Tensor) -> Tensor:
        """[K] to [M]: for each token the sum of the scores of all steps that end at this token or later."""
        placed = self.at_steps(scores)
        return linear_scan(self.view.decay(1.0, placed), placed)

    def whiten(self, values: Tensor) -> Tensor:
        """[M]: `values`, shifted and scaled to mean 0 and standard deviation 1 over the policy tokens of the global
        batch."""
        # Sums are float64. If all values are equal, float32 sums would leave a rounding error. The standard deviation
        # is then nearly 0, and dividing by it would enlarge the error to about 1.
        total = values.sum(dtype=torch.float64)
        sums = self.reduce(torch.stack([total.new_tensor(values.numel()), total]))
        count, total = sums[0], sums[1]
        centred = values - (total / count.clamp(min=1)).to(values.dtype)
        squares = self.reduce(centred.square().sum(dtype=torch.float64))
        std = (squares / (count - 1).clamp(min=1)).sqrt() + 1e-8
        return centred / std.to(values.dtype)

    def zeros(self) -> Tensor:
        """float[M]: zeros."""
        return torch.zeros(self.view.index.numel(), dtype=self.dtype, device=self.view.index.device)

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.tokens.behaviour.dtype, torch.float32)


def step_tokens(episodes: Episodes, tokens: Tokens, view: PolicyTokens) -> tuple[Tensor, Tensor]:
    """The steps of this rank's sequences: the indices int64[k] of the k steps among the K steps of the batch, and the
    indices int64[k] of the steps' last policy tokens among the M tokens.

    Raises InvariantError: a step ends outside its sequence, or before the sequence's first policy token.
    """
    starts, first = _starts(episodes, view)
    step = (starts[episodes.step_sequence] >= 0).nonzero().squeeze(1)
    sequence, end = episodes.step_sequence[step], episodes.step_end[step]
    packed = starts[sequence] + end - 1 - tokens.position[starts[sequence]]
    inside = (packed >= 0) & (packed < view.packed)
    packed = packed.clamp(0, max(0, view.packed - 1))
    inside &= (tokens.sequence[packed] == sequence) & (tokens.position[packed] == end - 1)
    token = torch.searchsorted(view.index, packed, right=True) - 1
    inside &= token >= first[sequence]
    if not bool(inside.all()):
        bad = int((~inside).nonzero()[0])
        raise InvariantError(
            f"step_end={int(end[bad])} of sequence {int(sequence[bad])}: a step must end inside its sequence, at or "
            "after its first policy token, and positions must count up by one"
        )
    return step, token


def step_lengths(episodes: Episodes, tokens: Tokens, view: PolicyTokens) -> Tensor:
    """float64[K]: the number of policy tokens of each step, counted from the end of the previous step; 0 for steps of
    other ranks."""
    step, token = step_tokens(episodes, tokens, view)
    _, first = _starts(episodes, view)
    sequence = episodes.step_sequence[step]
    before = first[sequence] - 1
    follows = sequence[1:] == sequence[:-1]
    before[1:] = torch.where(follows, token[:-1], before[1:])
    lengths = torch.zeros(episodes.step_end.numel(), dtype=torch.float64, device=token.device)
    return lengths.index_copy_(0, step, (token - before).double())


def _starts(episodes: Episodes, view: PolicyTokens) -> tuple[Tensor, Tensor]:
    """int64[S] each: the index of each sequence's first packed token in [N], and of its first policy token in [M].

    Both are -1 if the sequence is on another rank or has no policy token.
    """
    lengths = view.sequences.lengths
    present = lengths > 0
    absent = torch.full((episodes.count,), -1, dtype=torch.int64, device=lengths.device)
    starts = absent.index_copy(0, view.owner[present], view.starts[present])
    return starts, absent.index_copy(0, view.owner[present], (lengths.cumsum(0) - lengths)[present])


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """The `advantages` float[M], and `returns` float[M].

    With a critic, `returns` are the critic's targets. Without a critic, they are only reported, or None.
    """

    advantages: Tensor
    returns: Tensor | None = None


class Advantage(Part):
    """Base of the estimators. The flags declare what an estimator needs and reads. When the configuration is read, they
    are checked against the run.

    - `needs_critic`, `needs_steps`: the estimator needs a critic, or step scores.
    - `needs_unit_steps`: only episodes whose step scores are in [-1, 1] are trained.
    - `needs_greedy`: every group needs a greedily sampled member.
    - `needs_group`: groups need several members.
    - `needs_collisions`: the estimator reads `Tokens.collisions`.
    - `uses_ratio`: the estimator itself corrects for the age of the data by pi_prox / mu.
    - `uses_reward`: the estimator reads the reward, so a KL in the reward has an effect.
    """

    kind = "advantage"
    needs_critic: ClassVar[bool] = False
    needs_steps: ClassVar[bool] = False
    needs_unit_steps: ClassVar[bool] = False
    needs_greedy: ClassVar[bool] = False
    needs_group: ClassVar[bool] = False
    needs_collisions: ClassVar[bool] = False
    uses_ratio: ClassVar[bool] = False
    uses_reward: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, rollouts: Rollouts) -> Estimate:
        """The advantage of every policy token."""


class SequenceAdvantage(Advantage):
    """An estimator that gives all tokens of a sequence the same advantage."""

    @abstractmethod
    def scores(self, episodes: Episodes) -> Tensor:
        """float64[S]: one advantage per sequence."""

    def __call__(self, rollouts: Rollouts) -> Estimate:
        return Estimate(rollouts.spread(self.scores(rollouts.episodes)))


class TokenAdvantage(Advantage):
    """Base of estimators that use a reward for each token."""

    step_weight: float = param(
        0.0, "weight of the step scores; each score is a reward at the end of its step", "[0, inf)"
    )
    gamma: float = param(1.0, "discount per policy token", "[0, 1]")
