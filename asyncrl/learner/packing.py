"""From the trajectories of a plan to packed forward passes."""

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
from torch.nn.functional import pad

from asyncrl.algorithms.batch import Episodes, Tokens
from asyncrl.algorithms.view import View
from asyncrl.data.rendered import Rendered
from asyncrl.learner.images import BatchImages, PackedImages, batch_images
from asyncrl.learner.prefixes import Sharing, find_shared
from asyncrl.modelling.context import ContextGroup
from asyncrl.modelling.packed_layout import PackedLayout, send
from asyncrl.modelling.routing import RoutingError, RoutingShape
from asyncrl.modelling.vision import ImagePatches, VisionShape
from asyncrl.types import DEMONSTRATED, NO_VERSION, BatchPlan, Labels, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences:
    """Sequences for one forward pass, one after the other, as `layout` says: ids int64[U] and positions int64[U] in the
    sequence.

    - `needed` int64[M]: the tokens whose log-prob or value is needed.
    - `before` int64[M]: the token before each of them in its sequence.
    - `uses` float32[U]: for how many of the N tokens of the unshared sequences each token stands; 0 in padding, and in
      a dummy that only takes part in the other ranks' pass.
    - `copies` has two int64[K] where sequences share prefixes: among the N tokens of the unshared sequences those whose
      log-prob is needed, and for each of them its index in `needed`.
    - `routing` uint8[U, W], if experts are replayed: those that each token was sampled with, as
      `modelling.routing.RoutingShape` packs them.
    - `count` is N; without shared prefixes and padding N = U.
    - `part` is this rank's part, where several ranks divide the tokens.
    - `images` are those that stand among the tokens, if any.
    """

    ids: Tensor
    positions: Tensor
    needed: Tensor
    before: Tensor
    layout: PackedLayout
    count: int
    uses: Tensor
    copies: tuple[Tensor, Tensor] | None = None
    routing: Tensor | None = None
    part: RankPart | None = None
    images: PackedImages | None = None

    @property
    def computed(self) -> tuple[Tensor, Tensor]:
        """Ids of the tokens that this rank computes, and positions of those that its attention has: the same, or all
        where ranks divide the layers."""
        has_all = self.part is not None and self.part.group.divides_layers
        return self.ids[self._rows], self.positions if has_all else self.positions[self._rows]

    @property
    def computed_routing(self) -> Tensor | None:
        """The `routing` of the tokens that this rank computes."""
        return None if self.routing is None else self.routing[self._rows]

    @property
    def computed_uses(self) -> Tensor:
        """The `uses` of the tokens that this rank computes."""
        return self.uses[self._rows]

    @property
    def _rows(self) -> slice:
        return slice(None) if self.part is None else self.part.rows

    @property
    def sources(self) -> Tensor:
        """The rows, among the tokens that this rank computes, of those before needed ones, int64[P]."""
        return self.before if self.part is None else self.part.before

    @property
    def targets(self) -> Tensor:
        """The ids of the needed tokens that follow `sources`, int64[P]."""
        return self.ids[self.needed if self.part is None else self.needed[self.part.needed]]

    @staticmethod
    def of(sequences: Sequence[Tensor], sharing: Sharing | None = None) -> PackedSequences:
        """Sequences int64[T] on the host; every token that has one before it is needed."""
        positions = torch.cat([torch.arange(len(each)) for each in sequences])
        lengths = [len(each) for each in sequences]
        return PackedSequences.build(torch.cat(list(sequences)), positions, positions > 0, lengths, sharing)

    @staticmethod
    def build(
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
        sharing: Sharing | None,
        routing: Tensor | None = None,
        images: PackedImages | None = None,
    ) -> PackedSequences:
        """N tokens on the host, in sequences of these `lengths`; those of `mask` bool[N] are needed, which never has
        the first of a sequence. Prefixes that `sharing` takes are computed once, by the experts of `routing` uint8[N,
        W] that one of their sequences has there. A prefix with `images` is shared where these are the same."""
        needed = mask.nonzero()[:, 0]
        keys = ids if images is None else images.keys(ids)
        shared = None if sharing is None else find_shared(keys.numpy(), lengths, sharing)
        if shared is None:
            counts = PackedLayout.of(lengths), len(ids), torch.ones(len(ids))
            return PackedSequences(ids, positions, needed, needed - 1, *counts, None, routing, images=images)
        kept, rows, paths = (torch.from_numpy(each) for each in (shared.kept, shared.rows, shared.paths))
        once, copies = rows[needed].unique(return_inverse=True)
        layout = PackedLayout.of(shared.queries, shared.keys, paths)
        before, uses = rows[kept[once] - 1], rows.bincount(minlength=len(kept)).float()
        routing, images = None if routing is None else routing[kept], None if images is None else images.kept(kept)
        tokens = ids[kept], positions[kept], once, before
        return PackedSequences(*tokens, layout, len(ids), uses, (needed, copies), routing, images=images)

    def padded(self) -> PackedSequences:
        """The same with tokens behind the sequences, up to one of 16 sizes between a number and its double, so that few
        shapes are compiled for and allocated. These tokens belong to no sequence, and nothing needs them."""
        return self._padded(1 << max(4, (len(self.ids) - 1).bit_length() - 5))

    def _padded(self, step: int) -> PackedSequences:
        missing = -len(self.ids) % step
        routing = None if self.routing is None else pad(self.routing, (0, 0, 0, missing), value=255)
        ids, positions, uses = (pad(each, (0, missing)) for each in (self.ids, self.positions, self.uses))
        images = None if self.images is None else self.images.padded(missing)
        return replace(self, ids=ids, positions=positions, uses=uses, routing=routing, images=images)

    def divided(self, group: ContextGroup | None) -> PackedSequences:
        """The same on the host for a rank of `group`, whose ranks divide the tokens; None: it computes all of them."""
        if group is None:
            return self
        padded = self._padded(group.size)
        rows = group.rows(len(padded.ids))
        needed = ((self.before >= rows.start) & (self.before < rows.stop)).nonzero()[:, 0]
        part = RankPart(group, rows, needed, self.before[needed] - rows.start)
        return replace(padded, layout=self.layout.divided(group, len(padded.ids)), part=part)

    def to(self, device: torch.device) -> PackedSequences:
        """The same on `device`; the host does not wait for it."""
        ids, positions, needed, before, uses = (
            send(each, device) for each in (self.ids, self.positions, self.needed, self.before, self.uses)
        )
        copies = None if self.copies is None else (send(self.copies[0], device), send(self.copies[1], device))
        layout, routing = self.layout.to(device), None if self.routing is None else send(self.routing, device)
        part = None if self.part is None else self.part.to(device)
        images = None if self.images is None else self.images.to(device)
        return PackedSequences(ids, positions, needed, before, layout, self.count, uses, copies, routing, part, images)

    def unrouted(self) -> PackedSequences:
        """The same for a model that routes its tokens itself."""
        return self if self.routing is None else replace(self, routing=None)

    def whole(self, states: Tensor) -> Tensor:
        """The states [U, ...] of all tokens from those of the tokens that this rank computes."""
        return states if self.part is None else self.part.group.gather(states)

    def spread(self, values: Tensor) -> Tensor:
        """The values [P] at `sources`, at each of the N tokens that needs one; 0 elsewhere. Where ranks divide the
        tokens, all of them get those of all."""
        rows = self.needed
        if self.part is not None:
            values = self.part.group.collect(values, self.part.needed, len(rows))
        if self.copies is not None:
            rows, values = self.copies[0], values[self.copies[1]]
        return values.new_zeros(self.count).index_put((rows,), values)


@dataclass(frozen=True, slots=True, eq=False)
class RankPart:
    """The part of a pass that a rank of `group` computes: the tokens in `rows`.

    - `needed` int64[P]: which of the M needed tokens follow one of these.
    - `before` int64[P]: the row of that one in the part.
    """

    group: ContextGroup
    rows: slice
    needed: Tensor
    before: Tensor

    def to(self, device: torch.device) -> RankPart:
        """The same on `device`; the host does not wait for it."""
        return replace(self, needed=send(self.needed, device), before=send(self.before, device))


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPass:
    """The sequences of a forward pass, which of the batch's tokens they are, int64[N], and which of these N are the
    policy's. A pass without rows has a dummy sequence: the other ranks have some."""

    packed: PackedSequences
    rows: Tensor
    view: View

    def padded(self) -> ForwardPass:
        """The same with `PackedSequences.padded`."""
        return replace(self, packed=self.packed.padded())

    def divided(self, group: ContextGroup | None) -> ForwardPass:
        """The same with `PackedSequences.divided`."""
        return replace(self, packed=self.packed.divided(group))

    def to(self, device: torch.device) -> ForwardPass:
        """The same on `device`; the host does not wait for it."""
        view = self.view.moved(lambda values: send(values, device))
        return ForwardPass(self.packed.to(device), send(self.rows, device), view)


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """The episodes of the plan that this rank trains, packed in the order of the plan.

    `tokens` are on the rank's device. What passes are built from stays on the host, which never waits for the device to
    build one: ids int64[N] are the token ids of `tokens`, and mask bool[N] is theirs. A forward pass takes every branch
    of an episode as a sequence: positions int64[N] restart with each branch, and `lengths` has the tokens of each
    branch by the episode's index in the plan, ascending. A pass computes prefixes once that its sequences share and
    `sharing` takes. With `routing` uint8[N, W] tokens go to these experts (see `PackedSequences`); `refused` counts the
    episodes whose own were none of the model's. `images` are those that stand among the tokens, if any.
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

    def rows(self, members: Sequence[int]) -> Tensor:
        """Where among the N tokens those of the episodes `members` are, int64, on the host."""
        sizes = [sum(each) for each in self.lengths.values()]
        spans = dict(zip(self.lengths, pairwise([0, *accumulate(sizes)]), strict=True))
        return torch.cat([torch.arange(0), *(torch.arange(*spans[each]) for each in members)])

    def forward_pass(self, members: Sequence[int]) -> ForwardPass:
        """The tokens of the episodes `members` (ascending), on the host."""
        rows = self.rows(members)
        owners = torch.tensor(members, dtype=torch.int64)
        sizes = torch.tensor([sum(self.lengths[each]) for each in members], dtype=torch.int64)
        view = View.chosen(self.mask[rows], owners.repeat_interleave(sizes))
        return ForwardPass(self._packed(members, rows), rows, view)

    def _packed(self, members: Sequence[int], rows: Tensor) -> PackedSequences:
        routing = self.routing
        if not members:
            missing = None if routing is None else routing.new_full((2, routing.shape[1]), 255)
            dummy = PackedSequences.of([self.ids.new_zeros(2)])
            return replace(dummy, uses=torch.zeros_like(dummy.uses), routing=missing)
        lengths = [length for each in members for length in self.lengths[each]]
        routing = None if routing is None else routing[rows]
        images = None if self.images is None else self.images.chosen(rows)
        return PackedSequences.build(
            self.ids[rows], self.positions[rows], self.mask[rows], lengths, self.sharing, routing, images
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
) -> LocalBatch:
    """The batch of `trajectories`, whose indices in the plan are `members`, ascending. Tokens are restricted where a
    grammar left less than `min_grammar_mass`. With the model's `routing` they go to the experts that their engine used,
    where these are known; those of an episode that are none of this model's are refused and counted. For a model that
    reads images, `vision` says how, and `images` has those that the trajectories name.

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
    """The batch of demonstrations, whose indices in the step's are `members`, ascending. No policy sampled them, so
    their tokens have neither log-probs nor versions."""
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
    """bool[N]: the tokens that demonstrations teach; None where none of the trajectories is one."""
    if not any(each.is_demonstration for each in trajectories):
        return None
    return _joined([each.versions == DEMONSTRATED for each in trajectories], torch.bool, device)


def _restricted(trajectory: Trajectory, least: float) -> NDArray[np.bool_]:
    """bool[T]: where a grammar left the policy less than the mass `least`."""
    mass = trajectory.grammar_mass
    found: NDArray[np.bool_] = mass < least if mass.size else np.zeros(len(trajectory), np.bool_)
    return found


def build_episodes(
    plan: BatchPlan, labels: Sequence[Labels], device: torch.device, greedy_sibling: bool = False
) -> Episodes:
    """The S episodes of the plan. `extra` holds the named scores that every trajectory has. With `greedy_sibling` the
    first member of every group in the plan is the greedy one."""
    order = {group: index for index, group in enumerate(dict.fromkeys(plan.group_ids))}
    firsts = {plan.group_ids.index(group) for group in order}
    names = set(labels[0].extra).intersection(*(each.extra for each in labels))
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
        extra={name: _scores([each.extra[name] for each in labels], device) for name in sorted(names)},
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
