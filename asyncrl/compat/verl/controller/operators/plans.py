"""Converts a batch in verl's layout to a batch of the learner: planned, packed and divided among ranks as in a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Episodes, Tokens
from asyncrl.compat.verl.batches.fields import require
from asyncrl.compat.verl.batches.from_batch import to_labels, to_trajectories
from asyncrl.compat.verl.batches.packed import NAMES, PREPARED, add_tokens, to_tokens
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.controller.operators.parts import ROW
from asyncrl.config.changes import ConfigChange
from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.batch.fetching import BatchFetcher, FetchedBatch
from asyncrl.learner.batch.local_batch import build_episodes
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.types import BatchPlan, LabelNeeds, Labels, Trajectory

VERSION = "version"
"""The key of `meta_info` with the policy version that generated a batch."""


def plan_of(data: DataProto, trajectories: Sequence[Trajectory], step: int = 0) -> BatchPlan:
    """The batch plan with these trajectories, in order."""
    pairs = pairwise(trajectories)
    return BatchPlan(
        step=step,
        version=int(data.meta_info.get(VERSION, 0)),
        ids=[each.id for each in trajectories],
        group_ids=[each.group_id for each in trajectories],
        tokens=[len(each) for each in trajectories],
        sampled=[each.sampled_tokens for each in trajectories],
        weights=[1.0] * len(trajectories),
        shared=[0, *(new.begins_as(old) if new.group_id == old.group_id else 0 for old, new in pairs)],
    )


def trajectories_of(data: DataProto) -> list[Trajectory]:
    """The trajectories of a batch. Raises DataProtoError: the batch has no rows, or lacks a field."""
    require(len(data) > 0, "the batch has no rows")
    return to_trajectories(data, version=int(data.meta_info.get(VERSION, 0)))


def labels_of(data: DataProto) -> list[Labels]:
    """The labels of the batch's trajectories.

    A reward is the sum of a row's token_level_rewards, or of its token_level_scores if the batch has no
    token_level_rewards. Raises DataProtoError: the batch has no token_level_scores.
    """
    require(
        data.batch is not None and "token_level_scores" in data.batch,
        "the batch has no token_level_scores: call compute_reward, or add rewards float32[B, R] under that name",
    )
    rewards = data.batch.get("token_level_rewards", data.batch["token_level_scores"])
    batch = data.batch.exclude("token_level_scores").set("token_level_scores", rewards)
    return to_labels(DataProto(batch, data.non_tensor_batch, data.meta_info))


def episodes_of(data: DataProto, greedy_sibling: bool, needs: LabelNeeds) -> Episodes:
    """The Episodes of a batch, on the CPU.

    Raises DataProtoError: a field is missing, or a row lacks a score that the algorithm `needs`.
    """
    plan, labels = plan_of(data, trajectories_of(data)), labels_of(data)
    for each in labels:
        unmet = needs.unmet(each)
        require(not unmet, f"{each.trajectory_id}: {unmet}; add the missing scores to `extra_scores` of every row")
    return build_episodes(plan, labels, torch.device("cpu"), greedy_sibling, needs)


class _OneBatch(BatchSource):
    """The trajectories and labels of one batch, in the form in which the learner takes them from a replay.

    With `labels=None`, for operators that do not read labels, all rewards and scores are 0.
    """

    def __init__(self, trajectories: Sequence[Trajectory], labels: Sequence[Labels] | None, needs: LabelNeeds) -> None:
        self._trajectories = {each.id: each for each in trajectories}
        self._labels = {each.trajectory_id: each for each in labels or ()}
        self._zeros = dict.fromkeys(needs.scores, 0.0)

    def configure(self, values: Mapping[str, Any], time: int) -> Sequence[ConfigChange]:
        return []

    def plan(self, step: int) -> BatchPlan | None:
        return None

    def plan_ahead(self, step: int) -> BatchPlan | None:
        return None

    def labels(self, ids: Sequence[str]) -> list[Labels]:
        return [self._labels.get(name) or Labels(name, 0.0, 0.0, "none", extra=self._zeros) for name in ids]

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        return [self._trajectories[name] for name in ids]


@dataclass(frozen=True)
class Batches:
    """Makes the learner's batches for one model.

    `fetcher` opens the learner's fetcher on a source. `needs` are the labels that the algorithm needs.
    """

    fetcher: Callable[[BatchSource], BatchFetcher]
    needs: LabelNeeds
    ranks: Ranks

    def of(self, data: DataProto, step: int, trained: bool) -> FetchedBatch:
        """This rank's part of the batch. Fields that operators added, such as advantages, are in its tokens.

        `trained` is true if the batch is for an update, and needs rewards. Raises DataProtoError: a field is missing.
        """
        trajectories = trajectories_of(data)
        labels = labels_of(data) if trained else None
        fetcher = self.fetcher(_OneBatch(trajectories, labels, self.needs))
        fetched = fetcher.take(plan_of(data, trajectories, step))
        given, device = to_tokens(data), self.ranks.device
        own = torch.isin(given.sequence, torch.tensor(list(fetched.batch.lengths)))
        names = {*NAMES.values(), *PREPARED.values()}
        numbers: dict[str, Any] = {name: each[own].to(device) for name, each in given.tensors() if name in names}
        return replace(fetched, batch=replace(fetched.batch, tokens=replace(fetched.batch.tokens, **numbers)))


def rows_with(data: DataProto, fetched: FetchedBatch, **numbers: Tensor) -> DataProto:
    """The rows of this rank's trajectories, with the field ROW and a field for each of `numbers`.

    Each of `numbers` is [N]: a value for each token of these trajectories.
    """
    given = to_tokens(data)
    members = torch.tensor(list(fetched.batch.lengths), dtype=torch.int64)
    own = torch.isin(given.sequence, members)
    spread: dict[str, Any] = {}
    for name, values in numbers.items():
        spread[name] = values.new_zeros(len(given.sequence), device="cpu").masked_scatter(own, values.cpu())
    names = {ours: theirs for theirs, ours in (NAMES | PREPARED).items()}
    attended = data.batch.select("attention_mask", "prompts", "responses")
    tokens = Tokens(given.sequence, given.position, given.mask, given.behaviour, given.versions, **spread)
    added = add_tokens(DataProto(attended), tokens, [names[name] for name in spread])
    owners = given.sequence[torch.cumsum(data.batch["attention_mask"].sum(-1), 0) - 1]
    rows = torch.isin(owners, members)
    found = {names[name]: added.batch[names[name]][rows] for name in spread}
    return DataProto.from_dict({**found, ROW: rows.nonzero()[:, 0]})
