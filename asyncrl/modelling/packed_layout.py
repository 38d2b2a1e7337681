"""Where the sequences of a packed pass lie among its queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from asyncrl.modelling.context import ContextGroup


def power_of_two(number: int) -> int:
    """The least power of two that is `number` or more."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(slots=True, eq=False)
class PackedLayout:
    """How the tokens of a pass attend to each other.

    Each of the S sequences has as many queries as tokens are computed for it, and as many keys as tokens there are from
    its beginning to the last of these; the queries are the last of the keys.

    - `bounds` int64[2, S + 1]: those of the sequences among the pass's queries, and among its keys. They stay on the
      host. Tokens after the last bound are padding.
    - `ends` int32[2, B + 1]: the same for the device. Empty sequences at the end bring their number to a power of two,
      since the kernels for GPUs prepare themselves anew for other numbers.
    - `paths` int64[sum of keys], where sequences share prefixes: the rows of the keys among the tokens of the pass.
      Else a token is the key that it is the query of.
    - `group`, where its ranks divide the tokens of the pass: each rank computes its part of them, and `own` is the
      layout of their queries alone, over the keys of the whole pass; None where attention has all tokens.
    """

    bounds: Tensor
    ends: Tensor
    paths: Tensor | None = None
    group: ContextGroup | None = None
    own: PackedLayout | None = None

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int] | None = None, paths: Tensor | None = None) -> PackedLayout:
        """The layout on the host of sequences that follow each other."""
        sides = [(0, *accumulate(side)) for side in (queries, queries if keys is None else keys)]
        missing = power_of_two(len(queries)) - len(queries)
        ends = [(*side, *side[-1:] * missing) for side in sides]
        return cls(torch.tensor(sides), torch.tensor(ends, dtype=torch.int32), paths)

    def divided(self, group: ContextGroup, tokens: int) -> PackedLayout:
        """The same on the host for a rank of `group` that computes its part of the `tokens` of the pass."""
        return replace(self, group=group, own=None if group.divides_layers else self._of_queries(group.rows(tokens)))

    def _of_queries(self, rows: slice) -> PackedLayout:
        """The layout of the queries in `rows`. A sequence that goes on behind them has no keys there either."""
        every = torch.arange(int(self.bounds[1, -1])) if self.paths is None else self.paths
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
            # The kernels need a sequence. All of these rows are padding, and nothing reads what this one gives.
            return PackedLayout.of([1], [1], every[:1])
        return PackedLayout.of(queries, keys, torch.cat(paths))

    def to(self, device: torch.device) -> PackedLayout:
        """The same for passes on `device`; the host does not wait for it."""
        return replace(
            self,
            ends=send(self.ends, device),
            paths=None if self.paths is None else send(self.paths, device),
            own=None if self.own is None else self.own.to(device),
        )


def send(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`; the host does not wait until it is there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
