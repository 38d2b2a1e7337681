"""From trajectories and labels to tensors: the episodes of the whole batch, and this rank's share of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algorithms.batch import Episodes, Tokens
from asyncrl.learner.backbone import Packed
from asyncrl.types import BatchPlan, Labels, Trajectory


def build_episodes(
    plan: BatchPlan, labels: Sequence[Labels], device: torch.device, greedy_sibling: bool = False
) -> Episodes:
    """The S sequences of the plan. `extra` holds the named scores that every trajectory has. With `greedy_sibling` the
    first member of every group, which a plan names first, is the greedy one."""
    order = {group: index for index, group in enumerate(dict.fromkeys(plan.group_ids))}
    names = set(labels[0].extra).intersection(*(each.extra for each in labels))
    steps = [len(each.step_scores) for each in labels]
    return Episodes(
        group=torch.tensor([order[group] for group in plan.group_ids], device=device),
        reward=_scores([each.reward for each in labels], device),
        outcome=_scores([each.outcome for each in labels], device),
        lengths=torch.tensor(plan.sampled, device=device),
        step_scores=_joined([each.step_scores for each in labels], torch.float32, device),
        step_sequence=torch.repeat_interleave(torch.tensor(steps)).to(device),
        step_end=_joined([each.step_ends for each in labels], torch.int64, device),
        extra={name: _scores([each.extra[name] for each in labels], device) for name in sorted(names)},
        version=plan.version,
        greedy=_firsts(plan.group_ids).to(device) if greedy_sibling else None,
        priority=None if set(plan.weights) == {1.0} else _scores(plan.weights, device),
    )


def _firsts(groups: Sequence[str]) -> Tensor:
    """True where a group appears for the first time, bool[S]."""
    first = {group: index for index, group in reversed(list(enumerate(groups)))}
    return torch.tensor([first[group] == index for index, group in enumerate(groups)])


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The episodes of the plan that this rank trains, packed in plan order: the sequences of the algorithms.

    ids int64[N] are the token ids that `tokens` speaks of; places int64[N] are their places in their branches, and
    `lengths` gives the tokens of each branch of an episode, by the episode's index in the plan: a forward pass sees
    every branch by itself.
    """

    ids: Tensor
    tokens: Tokens
    places: Tensor
    lengths: dict[int, list[int]]

    def rows(self, members: Sequence[int]) -> Tensor:
        """Where among the N tokens those of `members` are, int64."""
        return torch.isin(self.tokens.sequence, torch.tensor(members, device=self.ids.device)).nonzero()[:, 0]

    def packed(self, members: Sequence[int], rows: Tensor) -> Packed:
        """The tokens of `members` (ascending) at `rows`, for one forward pass; a dummy where there are none."""
        if not members:
            return Packed.of([self.ids.new_zeros(2)])
        lengths = [length for each in members for length in self.lengths[each]]
        return Packed(self.ids[rows], self.places[rows], self.tokens.mask[rows], lengths)


def build_share(members: Sequence[int], trajectories: Sequence[Trajectory], device: torch.device) -> Share:
    """The share of `trajectories`, whose indices in the plan are `members`, ascending."""
    owners = [np.full(len(each), member) for member, each in zip(members, trajectories, strict=True)]
    tokens = Tokens(
        sequence=_joined(owners, torch.int64, device),
        position=_joined([np.arange(len(each)) for each in trajectories], torch.int64, device),
        mask=_joined([each.loss_mask for each in trajectories], torch.bool, device),
        behaviour=_joined([each.logprobs for each in trajectories], torch.float32, device),
        versions=_joined([each.versions for each in trajectories], torch.int64, device),
    )
    ids = _joined([each.tokens for each in trajectories], torch.int64, device)
    lengths = [[end - start for start, end in each.branches] for each in trajectories]
    places = _joined([np.arange(length) for branches in lengths for length in branches], torch.int64, device)
    return Share(ids, tokens, places, dict(zip(members, lengths, strict=True)))


def _joined(arrays: Sequence[NDArray[Any]], dtype: torch.dtype, device: torch.device) -> Tensor:
    joined = np.concatenate(arrays) if arrays else np.zeros(0)
    return torch.from_numpy(joined).to(device, dtype)


def _scores(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
