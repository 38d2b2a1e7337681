"""Prefixes that sequences of a forward pass share: the pass computes their tokens once.

The members of a group share their prompt, and the branches of an episode their first turns. A causal model gives a
token the same hidden state in all sequences that begin with the same tokens. So a pass computes a sequence only from
where it departs from those before it; the sequence's attention reads the keys of its whole path. Longer sequences come
first: a prefix that is short for one of them may be worth sharing for those that follow. In the order of their tokens'
bytes, a sequence shares its longest prefix with a neighbour: two comparisons each find the whole tree.
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
    """Which prefixes are shared: those of at least `least` tokens, and of at least this `share` of the sequence."""

    least: int = 1
    share: float = 0.0

    def takes(self, common: int, length: int) -> bool:
        """Whether a sequence of `length` tokens does not compute the `common` ones that it begins with."""
        return common >= max(self.least, self.share * length)


EVERY = Sharing()
WORTHWHILE = {"cpu": Sharing(32, 1 / 8), "cuda": Sharing(32, 1 / 2)}
"""What saves time, by the kind of device. The kernels of GPUs for suffixes are slower than those for whole sequences.
On an H200 with a 0.6B model, sharing a third of each sequence took 4% longer, and sharing two thirds was 1.3 to 1.9
times as fast."""


def sharing_of(shares: bool | None, is_able: bool, device: str) -> Sharing | None:
    """What `learner.shared_prefixes` says for a policy that `is_able` to share, on a kind of device."""
    if shares is None:
        return WORTHWHILE[device] if is_able else None
    return EVERY if shares else None


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """How sequences of N tokens together are computed as U < N tokens.

    - `kept` int64[U]: which of the N are computed, in the order of the pass.
    - `rows` int64[N]: where among the U each of the N is computed.
    - `queries` and `keys`: of each sequence that has tokens of its own, how many these are, and the tokens of its path.
    - `paths` int64[sum of keys]: the rows among the U of these paths, one behind the other.
    """

    kept: Rows
    rows: Rows
    queries: list[int]
    keys: list[int]
    paths: Rows


def find_shared(ids: Rows, lengths: Sequence[int], sharing: Sharing) -> SharedPrefixes | None:
    """What the sequences share whose token ids int64[N] follow each other; None if no two have a prefix in common that
    `sharing` takes."""
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
