"""Computes pass@k, best@k and maj@k: exact expectations over all equally likely subsets of k of a task's n attempts.

verl instead takes 1000 random samples of k attempts with replacement. Its pass@k and best@k are lower, since a sample
may contain an attempt twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import comb
from statistics import fmean

KEPT = 4096
"""The number of vote distributions whose results are cached."""


def ks(attempts: int) -> list[int]:
    """The values of k: the powers of 2 up to the number of attempts, and this number itself."""
    return sorted({1 << power for power in range(attempts.bit_length())} | {attempts})


def pass_at(k: int, right: int, scored: int) -> float:
    """The probability that at least one of k attempts is right, if `right` of the `scored` >= k attempts are right.
    This is the unbiased estimate in Evaluating Large Language Models Trained on Code, 2021."""
    return 1 - comb(scored - right, k) / comb(scored, k)


def best_at(k: int, values: Sequence[float]) -> float:
    """The expected largest value among k of the n >= k `values`. For values 0 and 1 it equals pass@k."""
    # The i-th smallest value (from 0) is the largest of a subset whose other k - 1 values are among the i smaller ones.
    chances = (comb(index, k - 1) / comb(len(values), k) for index in range(len(values)))
    return sum(chance * value for chance, value in zip(chances, sorted(values), strict=True))


def majority_at(k: int, votes: Sequence[str], values: Sequence[float]) -> float:
    """The expected value of the majority answer of k of the n >= k attempts. Attempts with the same vote give the same
    answer, and the value of an answer is the mean over its attempts. Ties are broken at random.

    An empty vote counts for no answer. A subset without any vote has the mean value of its members."""
    if k == 1:
        return fmean(values)
    by_vote: dict[str, list[float]] = defaultdict(list)
    for vote, value in zip(votes, values, strict=True):
        by_vote[vote].append(value)
    silent = by_vote.pop("", [])
    counts = tuple(sorted(map(len, by_vote.values())))
    chance = dict(zip(counts, _chances(counts, len(silent), k), strict=True))
    no_vote = comb(len(silent), k) / comb(len(votes), k)
    voted = sum(chance[len(each)] * fmean(each) for each in by_vote.values())
    return voted + (fmean(silent) * no_vote if no_vote else 0)


@lru_cache(KEPT)
def _chances(counts: tuple[int, ...], silent: int, k: int) -> list[float]:
    """The probability of each answer to be the majority answer of k attempts. `counts` has the number of attempts with
    each answer, and `silent` attempts gave no answer."""
    subsets = comb(sum(counts) + silent, k)
    chance = {count: _winning(count, counts, silent, k) / subsets for count in set(counts)}
    return [chance[count] for count in counts]


def _winning(own: int, counts: Sequence[int], silent: int, k: int) -> float:
    """The number of subsets of k attempts in which an answer with `own` attempts has the most votes. A tie between m
    answers counts as 1/m."""
    others = Counter(counts)
    others[own] -= 1
    total = 0.0
    if k == sum(counts) + silent:
        # The only subset has every attempt.
        return (own == max(counts)) / counts.count(own)
    for most in range(1, min(own, k) + 1):
        # Maps a pair to the number of ways to choose the other attempts. The pair has the number of attempts chosen so
        # far, and the number of answers that are tied with this one.
        ways: dict[tuple[int, int], int] = {
            (taken, 0): comb(silent, taken) for taken in range(min(silent, k - most) + 1)
        }
        for count in others.elements():
            ways = _with_one_more(ways, count, most, k - most)
        total += comb(own, most) * sum(
            number / (1 + ties) for (taken, ties), number in ways.items() if taken == k - most
        )
    return total


def _with_one_more(ways: dict[tuple[int, int], int], count: int, most: int, room: int) -> dict[tuple[int, int], int]:
    """Return the `ways` of `_winning` after one more answer, which `count` attempts gave. At most `most` of these
    attempts are chosen, and at most `room` attempts in total."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    for (taken, ties), number in ways.items():
        for more in range(min(count, most, room - taken) + 1):
            found[taken + more, ties + (more == most)] += number * comb(count, more)
    return found
