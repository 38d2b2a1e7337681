"""Where the sequences of a packed pass lie, and in which runs the kernels for GPUs take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

LONG = 1024
"""Tokens from which a sequence goes to cuDNN."""
LONG_SUFFIX = 4096
"""Tokens behind a shared prefix from which they may go to cuDNN."""
FASTER = 1.7
"""How much longer the variable-length kernel takes for as many pairs of a query and a key, forward and backward."""


@dataclass(frozen=True, slots=True)
class Run:
    """The `count` sequences from the sequence `first` on, which one kernel takes, with their `queries` and `keys`: rows
    of the pass's queries and keys. The most queries of a sequence are `longest`, the most keys `deepest`.

    Where there is a `width`, cuDNN takes them, each over so many tokens. All are as long then, and `ahead` tokens of
    each are keys alone.
    """

    first: int
    count: int
    queries: slice
    keys: slice
    longest: int
    deepest: int
    width: int | None

    @property
    def ahead(self) -> int:
        return self.deepest - self.longest

    def takes(self, queries: int, keys: int, width: int | None) -> bool:
        """Whether another sequence may follow in the run."""
        return self.width == width and (width is None or width == queries == keys == self.longest)


@lru_cache(maxsize=64)
def runs_between(queries: tuple[int, ...], keys: tuple[int, ...]) -> list[Run]:
    """The runs, in order, of the sequences whose queries and keys lie between these bounds."""
    runs: list[Run] = []
    for index, (query, key) in enumerate(zip(pairwise(queries), pairwise(keys), strict=True)):
        longest, deepest = query[1] - query[0], key[1] - key[0]
        width, count, first, rows, others = _width(longest, deepest), 1, index, slice(*query), slice(*key)
        if runs and runs[-1].takes(longest, deepest, width):
            last = runs.pop()
            first, count = last.first, last.count + 1
            rows, others = slice(last.queries.start, rows.stop), slice(last.keys.start, others.stop)
            longest, deepest = max(longest, last.longest), max(deepest, last.deepest)
        runs.append(Run(first, count, rows, others, longest, deepest, width))
    return runs


def _width(queries: int, keys: int) -> int | None:
    """Over how many tokens cuDNN computes a sequence; None where cuDNN does not take it. cuDNN prepares itself for
    every width anew, which takes longer than a pass, so there are few: four between a number and its double.

    Behind a shared prefix cuDNN has much to do besides: it computes the rows of the prefix, too, takes each sequence by
    itself, and needs copies. So it takes long suffixes of short prefixes only, where it is faster all the same.
    """
    if keys < LONG:
        return None
    step = 1 << (keys.bit_length() - 3)
    width = -(-keys // step) * step
    pairs = keys**2 - (keys - queries) ** 2
    if queries < keys and (queries < LONG_SUFFIX or FASTER * pairs < width**2):
        return None
    return width


@dataclass(slots=True, eq=False)
class PackedLayout:
    """How the tokens of a pass attend to each other.

    Each of the S sequences has as many queries as tokens are computed for it, and as many keys as tokens there are from
    its beginning to the last of these; the queries are the last of the keys.

    - `bounds` int64[2, S + 1]: those of the sequences among the pass's queries, and among its keys. They stay on the
      host. Tokens after the last bound are padding.
    - `ends` int32[2, S + R]: the bounds of the sequences of each of the R runs within that run, one run after the
      other.
    - `paths` int64[sum of keys], where sequences share prefixes: the rows of the keys among the tokens of the pass.
      Else a token is the key that it is the query of.
    """

    bounds: Tensor
    ends: Tensor
    paths: Tensor | None = None

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int] | None = None, paths: Tensor | None = None) -> PackedLayout:
        """The layout on the host of sequences that follow each other."""
        sides = [(0, *accumulate(side)) for side in (queries, queries if keys is None else keys)]
        runs = runs_between(sides[0], sides[1])
        members = [range(run.first, run.first + run.count + 1) for run in runs]
        ends = [[side[each] - side[run[0]] for run in members for each in run] for side in sides]
        return cls(torch.tensor(sides), torch.tensor(ends, dtype=torch.int32), paths)

    def to(self, device: torch.device) -> PackedLayout:
        """The same for passes on `device`; the host does not wait for it."""
        return PackedLayout(
            self.bounds, send(self.ends, device), None if self.paths is None else send(self.paths, device)
        )


def send(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`; the host does not wait until it is there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
