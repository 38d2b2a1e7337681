"""Exact expectations of what k of the n attempts at a task give, over all subsets of k attempts, each as likely.

They need no random numbers. verl estimates the same by 1000 samples of k attempts with replacement; that is lower for
pass@k and best@k, since a sample may hold an attempt twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import comb
from statistics import fmean

KEPT = 4096
"""Distributions of votes whose chances are remembered."""


def ks(attempts: int) -> list[int]:
    """1, 2, 4 and so on, and the number of attempts."""
    return sorted({1 << power for power in range(attempts.bit_length())} | {attempts})


def pass_at(k: int, right: int, scored: int) -> float:
    """The chance that one of k attempts is right, of a task of which `right` of `scored` attempts are; `scored` is at
    least k. The unbiased estimate of Evaluating Large Language Models Trained on Code, 2021."""
    return 1 - comb(scored - right, k) / comb(scored, k)


def best_at(k: int, values: Sequence[float]) -> float:
    """The expected greatest value of k of the n >= k `values`. For values 0 and 1 it is pass@k."""
    # The i-th smallest, counted from 0, is the greatest of the subsets whose other k - 1 members are among the i below.
    chances = (comb(index, k - 1) / comb(len(values), k) for index in range(len(values)))
    return sum(chance * value for chance, value in zip(chances, sorted(values), strict=True))


def majority_at(k: int, votes: Sequence[str], values: Sequence[float]) -> float:
    """The expected value of the answer that most of k of the n >= k attempts give. Attempts with the same vote give the
    same answer, whose value is the mean of theirs; answers with equally many votes are equally likely chosen.

    An attempt without a vote is empty text and votes for nothing. A subset without any vote has the mean value of its
    members.
    """
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
    """The chance of each answer that k attempts choose it, if `counts` attempts gave the answers and `silent` gave
    none."""
    subsets = comb(sum(counts) + silent, k)
    chance = {count: _winning(count, counts, silent, k) / subsets for count in set(counts)}
    return [chance[count] for count in counts]


def _winning(own: int, counts: Sequence[int], silent: int, k: int) -> float:
    """The number of subsets of k in which an answer with `own` attempts has the most votes; where it shares them with
    others, its part."""
    others = Counter(counts)
    others[own] -= 1
    total = 0.0
    if k == sum(counts) + silent:
        # The only subset has every attempt.
        return (own == max(counts)) / counts.count(own)
    for most in range(1, min(own, k) + 1):
        # The ways to take the rest, by the number of attempts taken and the number of answers with as many votes.
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
    """The ways with one more answer of `count` attempts, of which at most `most` are taken, and `room` in all."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    for (taken, ties), number in ways.items():
        for more in range(min(count, most, room - taken) + 1):
            found[taken + more, ties + (more == most)] += number * comb(count, more)
    return found
