"""Packs sequences, so that a model computes several in one forward pass, without padding between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.learner.batch.images import PackedImages
from asyncrl.learner.batch.prefixes import Sharing, find_shared
from asyncrl.modelling.context import ContextGroup
from asyncrl.modelling.packed_layout import PackedLayout, send


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences:
    """Concatenated sequences for one forward pass, with the `layout` of their attention. The sequences have N tokens.
    The pass computes U tokens: it computes shared prefixes only once, and may add padding.

    - `ids` int64[U]: the ids of the computed tokens.
    - `positions` int64[U]: their positions within the sequences.
    - `needed` int64[M]: the tokens whose log-prob or value is needed.
    - `before` int64[M]: the token before each needed token in its sequence.
    - `uses` int64[U]: how many of the N tokens each computed token represents. It is 0 in padding, and in a dummy
      sequence, which is computed only because other ranks have a pass. These are integers, since FSDP rounds the
      floating-point inputs of a pass to the model's dtype.
    - `copies` has two tensors int64[K] if sequences share prefixes: the tokens among the N whose log-prob is needed,
      and the index of each of them in `needed`.
    - `routing` uint8[U, W], if tokens go to the experts that the engine recorded: the experts of each token, as
      `modelling.routing.RoutingShape` packs them.
    - `count` is N. Without shared prefixes and padding, U equals N.
    - `part` is this rank's part, if several ranks divide the tokens.
    - `images` are the images among the tokens, if there are any.
    - `measured` int64[E], on the host: the tokens whose entropy is a metric, as indices in `sources`.
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
    measured: Tensor | None = None

    @property
    def computed(self) -> tuple[Tensor, Tensor]:
        """The ids of the tokens that this rank computes, and the positions for its attention. The positions are those
        of the same tokens, or of all tokens if ranks divide the layers.
        """
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
        """The tokens before needed ones, as rows int64[P] among the tokens that this rank computes."""
        return self.before if self.part is None else self.part.before

    @property
    def targets(self) -> Tensor:
        """The ids of the needed tokens that follow `sources`, int64[P]."""
        return self.ids[self.needed if self.part is None else self.needed[self.part.needed]]

    @staticmethod
    def of(sequences: Sequence[Tensor], sharing: Sharing | None = None) -> PackedSequences:
        """Pack sequences int64[T] on the host. Every token but the first of each sequence is needed."""
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
        measured: Tensor | None = None,
    ) -> PackedSequences:
        """Pack N tokens on the host, in sequences of these `lengths`.

        - `mask` bool[N] marks the needed tokens. It must not mark the first token of a sequence.
        - Prefixes that `sharing` accepts are computed once. Their tokens go to the experts that `routing` uint8[N, W]
          has for one of the sequences that share them.
        - A prefix with `images` is shared only if the images are the same.
        - `measured` bool[N] marks tokens whose entropy is a metric. It counts only at needed tokens.
        """
        needed = mask.nonzero()[:, 0]
        keys = ids if images is None else images.keys(ids)
        shared = None if sharing is None else find_shared(keys.numpy(), lengths, sharing)
        if shared is None:
            counts = PackedLayout.of(lengths), len(ids), torch.ones_like(ids)
            chosen = None if measured is None else measured[needed].nonzero()[:, 0]
            return PackedSequences(
                ids, positions, needed, needed - 1, *counts, None, routing, images=images, measured=chosen
            )
        kept, rows, paths = (torch.from_numpy(each) for each in (shared.kept, shared.rows, shared.paths))
        once, copies = rows[needed].unique(return_inverse=True)
        layout = PackedLayout.of(shared.queries, shared.keys, paths)
        before, uses = rows[kept[once] - 1], rows.bincount(minlength=len(kept))
        routing, images = None if routing is None else routing[kept], None if images is None else images.kept(kept)
        chosen = None if measured is None else copies[measured[needed]].unique()
        tokens = ids[kept], positions[kept], once, before
        return PackedSequences(
            *tokens, layout, len(ids), uses, (needed, copies), routing, images=images, measured=chosen
        )

    def padded(self) -> PackedSequences:
        """Return the same sequences with padding tokens after the last sequence."""
        # Pads to one of 16 sizes between a power of two and its double, so that few shapes need kernels and memory.
        return self._padded(1 << max(4, (len(self.ids) - 1).bit_length() - 5))

    def _padded(self, step: int) -> PackedSequences:
        missing = -len(self.ids) % step
        routing = None if self.routing is None else pad(self.routing, (0, 0, 0, missing), value=255)
        ids, positions, uses = (pad(each, (0, missing)) for each in (self.ids, self.positions, self.uses))
        images = None if self.images is None else self.images.padded(missing)
        return replace(self, ids=ids, positions=positions, uses=uses, routing=routing, images=images)

    def divided(self, group: ContextGroup | None) -> PackedSequences:
        """Return the same sequences for a rank of `group`, whose ranks divide the tokens. If `group` is None, this rank
        has all tokens."""
        if group is None:
            return self
        padded = self._padded(group.size)
        rows = group.rows(len(padded.ids))
        needed = ((self.before >= rows.start) & (self.before < rows.stop)).nonzero()[:, 0]
        part = RankPart(group, rows, needed, self.before[needed] - rows.start)
        measured = None if self.measured is None else torch.isin(needed, self.measured).nonzero()[:, 0]
        return replace(padded, layout=self.layout.divided(group, len(padded.ids)), part=part, measured=measured)

    def to(self, device: torch.device) -> PackedSequences:
        """Copy to `device` asynchronously."""
        ids, positions, needed, before, uses = (
            send(each, device) for each in (self.ids, self.positions, self.needed, self.before, self.uses)
        )
        copies = None if self.copies is None else (send(self.copies[0], device), send(self.copies[1], device))
        layout, routing = self.layout.to(device), None if self.routing is None else send(self.routing, device)
        part = None if self.part is None else self.part.to(device)
        images = None if self.images is None else self.images.to(device)
        return PackedSequences(
            ids, positions, needed, before, layout, self.count, uses, copies, routing, part, images, self.measured
        )

    def unrouted(self) -> PackedSequences:
        """Return the same sequences for a model that routes its tokens itself."""
        return self if self.routing is None else replace(self, routing=None)

    def whole(self, states: Tensor) -> Tensor:
        """Return the states [U, ...] of all tokens, gathered from the ranks that compute them."""
        return states if self.part is None else self.part.group.gather(states)

    def spread(self, values: Tensor) -> Tensor:
        """Spread the values [P] at `sources` to the N tokens, with 0 at tokens that are not needed. If ranks divide the
        tokens, every rank gets the values of all ranks."""
        rows = self.needed
        if self.part is not None:
            values = self.part.group.collect(values, self.part.needed, len(rows))
        if self.copies is not None:
            rows, values = self.copies[0], values[self.copies[1]]
        return values.new_zeros(self.count).index_put((rows,), values)


@dataclass(frozen=True, slots=True, eq=False)
class RankPart:
    """The part of a pass that a rank of `group` computes: the tokens in `rows`.

    - `needed` int64[P]: the needed tokens that follow a token in `rows`, as indices in `PackedSequences.needed`.
    - `before` int64[P]: the token before each of them, as a row of the part.
    """

    group: ContextGroup
    rows: slice
    needed: Tensor
    before: Tensor

    def to(self, device: torch.device) -> RankPart:
        """Copy to `device` asynchronously."""
        return replace(self, needed=send(self.needed, device), before=send(self.before, device))


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPass:
    """A forward pass of a batch.

    - `packed`: the sequences of the pass, with N tokens.
    - `rows` int64[N]: the rows of these tokens in the batch. A pass without rows has a dummy sequence, so that this
      rank takes part in the collectives of the other ranks.
    - `view` selects the policy's tokens among the N.
    - `measured` bool[N]: the tokens whose entropy is a metric (see `entropy_sample`).
    """

    packed: PackedSequences
    rows: Tensor
    view: PolicyTokens
    measured: Tensor

    def padded(self) -> ForwardPass:
        """Pad the sequences: see `PackedSequences.padded`."""
        return replace(self, packed=self.packed.padded())

    def divided(self, group: ContextGroup | None) -> ForwardPass:
        """Divide the sequences: see `PackedSequences.divided`."""
        return replace(self, packed=self.packed.divided(group))

    def to(self, device: torch.device) -> ForwardPass:
        """Copy to `device` asynchronously."""
        view = self.view.moved(lambda values: send(values, device))
        return ForwardPass(self.packed.to(device), send(self.rows, device), view, send(self.measured, device))
