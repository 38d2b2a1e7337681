"""Builds, from the trajectories of a plan, the batch that a rank trains, and the batch's packed forward passes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algorithms.batch import Episodes, Tokens
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.data.rendered import Rendered
from asyncrl.errors import InvariantError
from asyncrl.learner.batch.entropy_sample import entropy_sample
from asyncrl.learner.batch.images import BatchImages, batch_images
from asyncrl.learner.batch.packing import ForwardPass, PackedSequences
from asyncrl.learner.batch.prefixes import Sharing
from asyncrl.modelling.packed_layout import send
from asyncrl.modelling.routing import RoutingError, RoutingShape
from asyncrl.modelling.vision import ImagePatches, VisionShape
from asyncrl.types import DEMONSTRATED, NO_VERSION, NOTHING_NEEDED, BatchPlan, LabelNeeds, Labels, Trajectory

logger = logging.getLogger(__name__)

NEVER_TRAINED = np.iinfo(np.int32).max
"""A version in `BatchPlan.first_trained` that is newer than all others, so that none of the tokens is trained."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """This rank's share of the episodes of a plan, packed in the order of the plan.

    - `tokens` are on the rank's device. All else stays on the host, so that building a pass never waits for the device.
    - `ids` int64[N] and `mask` bool[N] are the ids and the loss mask of `tokens`.
    - `positions` int64[N] restart with each branch of an episode: an agent that rewrites its history begins a branch. A
      branch does not see the tokens before it, so a forward pass takes it as a sequence of its own.
    - `lengths` maps the index of an episode in the plan to the lengths of its branches. The indices are ascending.
    - If `sharing` accepts a prefix that sequences share, a pass computes it only once.
    - `routing` uint8[N, W] has the experts that the engine recorded, if tokens go to these experts (see
      `PackedSequences`).
    - `refused` counts the episodes whose recorded experts do not exist in the model.
    - `images` are the images among the tokens, if there are any.
    - `entropy_share`: the share of the policy's tokens whose entropy is measured.
    """

    ids: Tensor
    tokens: Tokens
    mask: Tensor
    positions: Tensor
    lengths: dict[int, list[int]]
    sharing: Sharing | None = None
    routing: Tensor | None = None
    refused: int = 0
    images: BatchImages | None = None
    entropy_share: float = 1.0

    def rows(self, members: Sequence[int]) -> Tensor:
        """Return the indices that the tokens of the episodes `members` have among the N tokens, as int64 on the
        host."""
        sizes = [sum(each) for each in self.lengths.values()]
        spans = dict(zip(self.lengths, pairwise([0, *accumulate(sizes)]), strict=True))
        return torch.cat([torch.arange(0), *(torch.arange(*spans[each]) for each in members)])

    def forward_pass(self, members: Sequence[int]) -> ForwardPass:
        """Build the forward pass of the episodes `members`, ascending, on the host."""
        rows = self.rows(members)
        owners = torch.tensor(members, dtype=torch.int64)
        sizes = torch.tensor([sum(self.lengths[each]) for each in members], dtype=torch.int64)
        sequence = owners.repeat_interleave(sizes)
        position = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        view = PolicyTokens.chosen(self.mask[rows], sequence)
        measured = self.mask[rows] & entropy_sample(sequence, position, self.entropy_share)
        return ForwardPass(self._packed(members, rows, measured), rows, view, measured)

    def _packed(self, members: Sequence[int], rows: Tensor, measured: Tensor) -> PackedSequences:
        routing = self.routing
        if not members:
            missing = None if routing is None else routing.new_full((2, routing.shape[1]), 255)
            dummy = PackedSequences.of([self.ids.new_zeros(2)])
            return replace(dummy, uses=torch.zeros_like(dummy.uses), routing=missing)
        lengths = [length for each in members for length in self.lengths[each]]
        routing = None if routing is None else routing[rows]
        images = None if self.images is None else self.images.chosen(rows)
        return PackedSequences.build(
            self.ids[rows], self.positions[rows], self.mask[rows], lengths, self.sharing, routing, images, measured
        )


def build_local_batch(
    members: Sequence[int],
    trajectories: Sequence[Trajectory],
    device: torch.device,
    sharing: Sharing | None = None,
    min_grammar_mass: float = 1.0,
    routing: RoutingShape | None = None,
    vision: VisionShape | None = None,
    images: Mapping[bytes, ImagePatches] = MappingProxyType({}),
    first_trained: Sequence[int] = (),
) -> LocalBatch:
    """Build the batch of `trajectories`, whose indices in the plan are `members`, ascending.

    - A token counts as restricted if a grammar left the policy less probability mass than `min_grammar_mass`.
    - If the model has a `routing` shape, tokens go to the experts that their engine recorded. An episode whose experts
      do not exist in this model is routed by the policy, and counted as refused.
    - `vision` is the layout of images for a model that reads them, and `images` has the images that the trajectories
      name.
    - `first_trained` has, for each trajectory, the oldest version whose tokens are trained. If it is empty, the tokens
      of all versions are trained.

    Raises ImageError: see `batch_images`.
    """
    restricted = [_restricted(each, min_grammar_mass) for each in trajectories]
    owners = [np.full(len(each), member) for member, each in zip(members, trajectories, strict=True)]
    tokens = Tokens(
        sequence=_joined(owners, torch.int64, device),
        position=_joined([np.arange(len(each)) for each in trajectories], torch.int64, device),
        mask=_joined([each.loss_mask for each in trajectories], torch.bool, device),
        behaviour=_joined([each.logprobs for each in trajectories], torch.float32, device),
        versions=_joined([each.versions for each in trajectories], torch.int64, device),
        restricted=_joined(restricted, torch.bool, device) if any(each.any() for each in restricted) else None,
        demonstrated=_demonstrated(trajectories, device),
        old=_old(trajectories, first_trained, device),
    )
    host = torch.device("cpu")
    ids = _joined([each.tokens for each in trajectories], torch.int64, host)
    mask = _joined([each.loss_mask for each in trajectories], torch.bool, host)
    lengths = [[end - start for start, end in each.branches] for each in trajectories]
    positions = _joined([np.arange(length) for branches in lengths for length in branches], torch.int64, host)
    seen = None if vision is None else batch_images(trajectories, images, vision)
    batch = LocalBatch(ids, tokens, mask, positions, dict(zip(members, lengths, strict=True)), sharing, images=seen)
    return batch if routing is None else _routed(batch, trajectories, routing)


def _routed(batch: LocalBatch, trajectories: Sequence[Trajectory], shape: RoutingShape) -> LocalBatch:
    rows, refused = [shape.missing(0)], 0
    for each in trajectories:
        found = each.routed_experts if each.routed_experts.size else shape.missing(len(each))
        try:
            shape.unpack(found)
        except RoutingError as error:
            logger.warning("%s is trained with the policy's own experts: %s", each.id, error)
            found, refused = shape.missing(len(each)), refused + 1
        rows.append(found)
    return replace(batch, routing=torch.from_numpy(np.concatenate(rows)), refused=refused)


def pack_demonstrations(
    members: Sequence[int], rows: Sequence[Rendered], device: torch.device, sharing: Sharing | None = None
) -> LocalBatch:
    """Build the batch of the demonstrations `rows`, whose indices among the step's demonstrations are `members`,
    ascending. No policy sampled them, so their tokens have neither log-probs nor versions."""
    owners = [np.full(len(ids), member) for member, (ids, _) in zip(members, rows, strict=True)]
    mask = _joined([each for _, each in rows], torch.bool, device)
    positions = [np.arange(len(ids)) for ids, _ in rows]
    tokens = Tokens(
        sequence=_joined(owners, torch.int64, device),
        position=_joined(positions, torch.int64, device),
        mask=mask,
        behaviour=torch.zeros_like(mask, dtype=torch.float32),
        versions=torch.full_like(mask, NO_VERSION, dtype=torch.int64),
    )
    host = torch.device("cpu")
    return LocalBatch(
        ids=_joined([ids for ids, _ in rows], torch.int64, host),
        tokens=tokens,
        mask=_joined([each for _, each in rows], torch.bool, host),
        positions=_joined(positions, torch.int64, host),
        lengths={member: [len(ids)] for member, (ids, _) in zip(members, rows, strict=True)},
        sharing=sharing,
    )


def _demonstrated(trajectories: Sequence[Trajectory], device: torch.device) -> Tensor | None:
    """Return bool[N], True at the tokens that demonstrations teach, or None if no trajectory is a demonstration."""
    if not any(each.is_demonstration for each in trajectories):
        return None
    return _joined([each.versions == DEMONSTRATED for each in trajectories], torch.bool, device)


def _old(trajectories: Sequence[Trajectory], first_trained: Sequence[int], device: torch.device) -> Tensor | None:
    """Return bool[N], True at sampled tokens of versions that are not trained, or None if there are none."""
    pairs = zip(trajectories, first_trained or [0] * len(trajectories), strict=True)
    old = [(each.versions >= 0) & (each.versions < first) for each, first in pairs]
    return _joined(old, torch.bool, device) if any(each.any() for each in old) else None


def _restricted(trajectory: Trajectory, least: float) -> NDArray[np.bool_]:
    """Return bool[T], True at tokens where a grammar left the policy less probability mass than `least`."""
    mass = trajectory.grammar_mass
    found: NDArray[np.bool_] = mass < least if mass.size else np.zeros(len(trajectory), np.bool_)
    return found


def without_greedy(plan: BatchPlan) -> BatchPlan:
    """Return the plan as it is trained if the first member of every group was decoded greedily. Such a member is only a
    baseline, so all of its tokens are context without loss."""
    # The recorded log-probs of such a member are for temperature 1, but its tokens were not sampled from the policy at
    # any temperature. So a loss, a KL or a statistic of ratios over its tokens would be wrong.
    greedy = _greedy_members(plan)
    first = plan.first_trained or [0] * len(plan.ids)
    return replace(
        plan,
        first_trained=[NEVER_TRAINED if index in greedy else version for index, version in enumerate(first)],
        trained=[0 if index in greedy else count for index, count in enumerate(plan.trained_tokens)],
    )


def _greedy_members(plan: BatchPlan) -> set[int]:
    """Return the indices in the plan of the first members of groups."""
    return {plan.group_ids.index(group) for group in dict.fromkeys(plan.group_ids)}


def build_episodes(
    plan: BatchPlan,
    labels: Sequence[Labels],
    device: torch.device,
    greedy_sibling: bool = False,
    needs: LabelNeeds = NOTHING_NEEDED,
) -> Episodes:
    """Build the S episodes of the plan. `needs` says which labels the algorithm needs. With `greedy_sibling` the first
    member of every group in the plan was decoded greedily. Raises InvariantError: labels do not meet the needs."""
    if unmet := next((f"{each.trajectory_id}: {why}" for each in labels if (why := needs.unmet(each))), ""):
        raise InvariantError(unmet)
    order = {group: index for index, group in enumerate(dict.fromkeys(plan.group_ids))}
    firsts = _greedy_members(plan)
    steps = [len(each.step_scores) for each in labels]
    shown = set(plan.demonstrations)
    return Episodes(
        group=torch.tensor([order[group] for group in plan.group_ids], device=device),
        reward=_scores([each.reward for each in labels], device),
        outcome=_scores([each.outcome for each in labels], device),
        lengths=torch.tensor(plan.sampled, device=device),
        step_scores=_joined([each.step_scores for each in labels], torch.float32, device),
        step_sequence=torch.repeat_interleave(torch.tensor(steps)).to(device),
        step_end=_joined([each.step_ends for each in labels], torch.int64, device),
        extra={name: _scores([each.extra[name] for each in labels], device) for name in needs.scores},
        version=plan.version,
        greedy=torch.tensor([i in firsts for i in range(len(labels))], device=device) if greedy_sibling else None,
        demonstrated=torch.tensor([i in shown for i in range(len(labels))], device=device) if shown else None,
        priority=None if set(plan.weights) == {1.0} else _scores(plan.weights, device),
    )


def _joined(arrays: Sequence[NDArray[Any]], dtype: torch.dtype, device: torch.device) -> Tensor:
    joined = np.concatenate(arrays) if arrays else np.zeros(0)
    return send(torch.from_numpy(joined).to(dtype), device)


def _scores(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
