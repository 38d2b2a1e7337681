"""Finds prefixes that sequences of a forward pass share, so that the pass computes their tokens once.

The members of a group share their prompt, and the branches of an episode share their first turns. A causal model gives
a token the same hidden state in all sequences that begin with the same tokens. So a pass leaves out the tokens at the
start of a sequence that an earlier sequence shares, and computes the rest. The sequence's attention reads the keys of
its whole path: the shared tokens and its own.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from asyncrl.types import common_prefix

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sharing:
    """The rule by which a prefix is shared: it has at least `least` tokens, and at least the fraction `share` of the
    sequence."""

    least: int = 1
    share: float = 0.0

    def takes(self, common: int, length: int) -> bool:
        """True if this rule shares the first `common` tokens of a sequence of `length` tokens."""
        return common >= max(self.least, self.share * length)


EVERY = Sharing()
WORTHWHILE = {"cpu": Sharing(32, 1 / 8), "cuda": Sharing(32, 1 / 2)}
"""Maps each kind of device to the rule that saves time on it. GPU kernels for suffixes are slower than kernels for
whole sequences. On an H200 with a 0.6B model, a pass took 4% longer when a third of each sequence was shared. It was
1.3 to 1.9 times as fast when two thirds were shared."""


def sharing_of(shares: bool | None, is_able: bool, device: str) -> Sharing | None:
    """Return the rule for prefixes on a kind of `device`. `shares` is learner.shared_prefixes. `is_able`: the policy
    can share prefixes."""
    if shares is None:
        return WORTHWHILE[device] if is_able else None
    return EVERY if shares else None


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """The layout of a pass that computes N tokens of several sequences as U < N tokens.

    - `kept` int64[U]: the tokens among the N that are computed, in the order of the pass.
    - `rows` int64[N]: the row among the U in which each of the N is computed.
    - `queries` and `keys` have a number for each sequence with tokens of its own. `queries` counts the sequence's own
      tokens, and `keys` counts all tokens of its path.
    - `paths` int64[sum of keys]: the rows of the paths among the U, concatenated.
    """

    kept: Rows
    rows: Rows
    queries: list[int]
    keys: list[int]
    paths: Rows


def find_shared(ids: Rows, lengths: Sequence[int], sharing: Sharing) -> SharedPrefixes | None:
    """Find the shared prefixes of sequences of these `lengths`, whose token ids are concatenated in `ids` int64[N].
    Returns None if no two sequences share a prefix that `sharing` accepts."""
    # Once sequences are sorted by the bytes of their tokens, each shares its longest prefix with a neighbour. So two
    # comparisons for each sequence find the whole tree of prefixes. Longer sequences come first: a prefix that is a
    # small part of a long sequence may be a large part of a shorter one.
    spans = list(pairwise(np.cumsum([0, *lengths]).tolist()))
    spans.sort(key=lambda span: ids[slice(*span)].tobytes())
    rows, kept, queries, keys, paths = np.empty_like(ids), [], [], [], []
    computed, done = 0, list[int]()
    for index in sorted(range(len(spans)), key=lambda index: spans[index][0] - spans[index][1]):
        start, end = spans[index]
        at = bisect(done, index)
        neighbours = [slice(*spans[each]) for each in done[max(0, at - 1) : at + 1]]
        found = [(common_prefix(ids[each], ids[start:end]), each.start) for each in neighbours]
        common, source = max(found, default=(0, 0))
        common = common if sharing.takes(common, end - start) else 0
        own = end - start - common
        rows[start : start + common] = rows[source : source + common]
        rows[start + common : end] = np.arange(computed, computed + own)
        done.insert(at, index)
        if own:
            kept.append(np.arange(start + common, end))
            queries.append(own)
            keys.append(end - start)
            paths.append(rows[start:end])
            computed += own
    if computed == len(ids):
        return None
    return SharedPrefixes(np.concatenate(kept), rows, queries, keys, np.concatenate(paths))
