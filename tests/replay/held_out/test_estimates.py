"""Estimates of pass@k, best@k and maj@k are exact: the means over all subsets of k attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.replay.held_out.estimates import best_at, ks, majority_at, pass_at

ATTEMPTS = st.lists(
    st.tuples(st.sampled_from(["", "1", "2", "3"]), st.sampled_from([0.0, 0.25, 1.0])), min_size=1, max_size=7
)


def chosen(subset: Sequence[tuple[str, float]]) -> float:
    """The value of the majority's answer, or the mean over answers with equally many votes."""
    votes = Counter(vote for vote, _ in subset if vote)
    if not votes:
        return fmean(value for _, value in subset)
    most = [vote for vote, count in votes.items() if count == max(votes.values())]
    return fmean(fmean(value for other, value in subset if other == vote) for vote in most)


@pytest.mark.slow
@given(ATTEMPTS, st.data())
def test_they_are_the_means_over_all_subsets(attempts: list[tuple[str, float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(attempts)))
    subsets = list(combinations(attempts, k))
    votes, values = zip(*attempts, strict=True)
    right = sum(value >= 1 for value in values)
    assert pass_at(k, right, len(values)) == pytest.approx(fmean(any(v >= 1 for _, v in each) for each in subsets))
    assert best_at(k, values) == pytest.approx(fmean(max(value for _, value in each) for each in subsets))
    assert majority_at(k, votes, values) == pytest.approx(fmean(map(chosen, subsets)))


def test_the_majority_is_right_more_often_than_one_attempt_where_right_answers_agree() -> None:
    # Three of five give 7, which is right; any three of them have two 7 or more, but for 7, 8, 9 with a third each.
    votes, values = ["7", "7", "7", "8", "9"], [1.0, 1.0, 1.0, 0.0, 0.0]
    assert majority_at(1, votes, values) == pytest.approx(0.6)
    assert majority_at(3, votes, values) == pytest.approx((7 + 3 / 3) / 10)
    assert majority_at(5, votes, values) == 1.0


def test_many_attempts_with_many_answers_are_counted_at_once() -> None:
    votes = [str(number % 20) for number in range(64)]
    assert 0 < majority_at(32, votes, [float(vote == "0") for vote in votes]) < 1


def test_k_doubles_up_to_the_number_of_attempts() -> None:
    assert ks(1) == [1]
    assert ks(6) == [1, 2, 4, 6]
    assert ks(8) == [1, 2, 4, 8]
