"""The layout of a packed pass: which queries and which keys belong to each of its sequences. Sequences may share a
prefix, which is then in the pass only once, so a sequence may have more keys than queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from asyncrl.modelling.context import ContextGroup


def power_of_two(number: int) -> int:
    """The smallest power of two that is `number` or more."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(slots=True, eq=False)
class PackedLayout:
    """The layout of S sequences in a pass, which defines which token attends to which.

    The queries of a sequence are its own tokens in the pass. Its keys are all tokens that it attends to: a prefix that
    it shares with other sequences, if there is one, and then its own tokens up to the last query. So its last query and
    its last key belong to the same token.

    - `bounds` int64[2, S + 1], on the host: the bounds of the sequences among the pass's queries, and among its keys.
      Tokens after the last bound are padding.
    - `ends` int32[2, B + 1]: the same bounds for the device. Empty sequences are added at the end, so that the number B
      of all sequences is a power of two: GPU kernels are prepared for fixed numbers of sequences.
    - `paths` int64[number of all keys]: the index of each key's token among the tokens of the pass. It is needed if
      sequences share prefixes. Without shared prefixes, each token of the pass is one query and one key of its own
      sequence, and `paths` has any other number of elements: see `has_paths`.
    - `group`: the ranks that divide the tokens of the pass, if any do. Each rank computes its part of the tokens.
    - `own`: the layout of this rank's queries over the keys of the whole pass. None if this rank computes attention for
      all tokens.
    """

    bounds: Tensor
    ends: Tensor
    paths: Tensor
    group: ContextGroup | None = None
    own: PackedLayout | None = None

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int] | None = None, paths: Tensor | None = None) -> PackedLayout:
        """Make the layout, on the host, of consecutive sequences with these numbers of queries and keys."""
        sides = [(0, *accumulate(side)) for side in (queries, queries if keys is None else keys)]
        missing = power_of_two(len(queries)) - len(queries)
        ends = [(*side, *side[-1:] * missing) for side in sides]
        if paths is None:
            # A compiled layer takes a tensor in any case, so one graph serves passes with and without shared prefixes.
            # Torch would compile another graph for a tensor of 0 or 1 elements.
            paths = torch.zeros(2 if sides[1][-1] != 2 else 3, dtype=torch.int64)
        return cls(torch.tensor(sides), torch.tensor(ends, dtype=torch.int32), paths)

    def divided(self, group: ContextGroup, tokens: int) -> PackedLayout:
        """The same layout for a rank of `group`, whose ranks divide the pass of `tokens` tokens."""
        return replace(self, group=group, own=None if group.divides_layers else self._of_queries(group.rows(tokens)))

    def _of_queries(self, rows: slice) -> PackedLayout:
        """The layout of the queries in `rows`. Keys after a sequence's last query in `rows` are left out."""
        every = torch.arange(int(self.bounds[1, -1])) if not has_paths(self.paths, self.bounds) else self.paths
        queries, keys, paths = [], [], []
        ours, theirs = (pairwise(side) for side in self.bounds.tolist())
        for (start, stop), (first, last) in zip(ours, theirs, strict=True):
            begin, end = max(start, rows.start), min(stop, rows.stop)
            if begin < end:
                seen = every[first : last - (stop - end)]
                queries.append(end - begin)
                keys.append(len(seen))
                paths.append(seen)
        if not queries:
            # All rows are padding. The kernels need a sequence, so the layout gets one, whose result is not used.
            return PackedLayout.of([1], [1], every[:1])
        return PackedLayout.of(queries, keys, torch.cat(paths))

    def to(self, device: torch.device) -> PackedLayout:
        """The same layout for passes on `device`; the host does not wait for the copy."""
        return replace(
            self,
            ends=send(self.ends, device),
            paths=send(self.paths, device),
            own=None if self.own is None else self.own.to(device),
        )


def has_paths(paths: Tensor, bounds: Tensor) -> bool:
    """True if `paths` of a layout with these `bounds` names the token of each key. False: the tokens of the pass are
    the keys, in order."""
    return len(paths) == int(bounds[1, -1])


def send(values: Tensor, device: torch.device) -> Tensor:
    """Begin to copy a host tensor to `device`. The host does not wait for the copy."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
