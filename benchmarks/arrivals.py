"""Computes tokens a second from the arrival times of answers, and the cost of a push. Times are in seconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise


class Arrivals:
    """Answers in the order of their arrival, each with its tokens. A token counts when its answer arrives."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._sums: list[int] = [0]

    def add(self, at: float, tokens: int) -> None:
        self._times.append(at)
        self._sums.append(self._sums[-1] + tokens)

    def tokens(self, begin: float, end: float) -> int:
        """Tokens in [begin, end)."""
        return self._sums[bisect_left(self._times, end)] - self._sums[bisect_left(self._times, begin)]

    def rate(self, begin: float, end: float) -> float:
        """Tokens a second in [begin, end)."""
        return self.tokens(begin, end) / (end - begin)

    def windows(self, begin: float, width: float, count: int) -> list[float]:
        """The rates of `count` consecutive windows."""
        return [self.rate(begin + index * width, begin + (index + 1) * width) for index in range(count)]

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest time between two arrivals that lies within [begin, end]."""
        return self._longest(bisect_left(self._times, begin), bisect_right(self._times, end))

    def longest_gap_around(self, begin: float, end: float) -> float:
        """The longest time between two arrivals that overlaps [begin, end]."""
        return self._longest(max(0, bisect_right(self._times, begin) - 1), bisect_left(self._times, end) + 1)

    def _longest(self, first: int, last: int) -> float:
        times = self._times[first:last]
        return max((after - before for before, after in pairwise(times)), default=0.0)


@dataclass(frozen=True, slots=True)
class PushCost:
    """The cost of one push. Rates are tokens a second in the calm time before, in the push, and in the calm time after.

    `standstill_s` is the longest time around the push in which no answer came, less the longest such time before it.
    `lost_s` is the generation that the push has cost by the end of the calm time after: the missing tokens, divided by
    the rate before the push.
    """

    push_s: float
    before: float
    during: float
    after: float
    standstill_s: float
    lost_s: float


def cost_of(arrivals: Arrivals, begin: float, end: float, calm_s: float) -> PushCost:
    """The cost of a push that lasted from `begin` to `end`, with `calm_s` of calm time before and after.

    Raises ValueError: no answer arrived in the calm time before.
    """
    before = arrivals.rate(begin - calm_s, begin)
    if not before:
        raise ValueError(f"no answer came in the {calm_s:g} s before a push: make the calm time longer")
    normal_gap = arrivals.longest_gap(begin - calm_s, begin)
    watched = end + calm_s - begin
    return PushCost(
        push_s=end - begin,
        before=before,
        during=arrivals.rate(begin, end),
        after=arrivals.rate(end, end + calm_s),
        standstill_s=max(0.0, arrivals.longest_gap_around(begin, end) - normal_gap),
        lost_s=watched - arrivals.tokens(begin, end + calm_s) / before,
    )
