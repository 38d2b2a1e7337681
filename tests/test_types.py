"""A noun that exists is valid: what breaks an invariant cannot be constructed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from asyncrl.errors import InvariantError
from asyncrl.types import BatchPlan, Labels, Role, Sampling, Step, Turn
from tests.helpers import make_task, make_trajectory


def test_a_sampled_token_without_a_logprob_is_an_error_not_a_zero() -> None:
    logprobs = make_trajectory().logprobs.copy()
    logprobs[-1] = np.nan
    with pytest.raises(InvariantError, match="no valid log-prob"):
        make_trajectory(logprobs=logprobs)


def test_a_positive_logprob_is_refused() -> None:
    with pytest.raises(InvariantError, match="at most 0"):
        make_trajectory(logprobs=np.full(8, 0.5, np.float32))


def test_a_sampled_token_without_a_version_is_refused() -> None:
    with pytest.raises(InvariantError, match="versions"):
        make_trajectory(versions=np.full(8, -1, np.int32))


def test_a_version_on_a_token_that_nobody_sampled_is_refused() -> None:
    with pytest.raises(InvariantError, match="versions"):
        make_trajectory(versions=np.zeros(8, np.int32))


@pytest.mark.parametrize("name", ["loss_mask", "logprobs", "versions"])
def test_arrays_of_different_lengths_are_refused(name: str) -> None:
    with pytest.raises(InvariantError, match="tokens have"):
        make_trajectory(**{name: getattr(make_trajectory(), name)[:-1]})


def test_a_wrong_dtype_is_refused() -> None:
    with pytest.raises(InvariantError, match="int64"):
        make_trajectory(tokens=np.arange(8))


def test_a_trajectory_without_a_sampled_token_is_refused() -> None:
    with pytest.raises(InvariantError, match="no token was sampled"):
        make_trajectory(loss_mask=np.zeros(8, bool), versions=np.full(8, -1, np.int32))


@pytest.mark.parametrize("spans", [[(0, 4), (3, 8)], [(4, 8), (0, 4)], [(0, 9)], [(5, 4)]])
def test_overlapping_or_unordered_spans_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(InvariantError, match="overlaps"):
        make_trajectory(turns=[Turn(start, end, Role.TOOL) for start, end in spans])
    with pytest.raises(InvariantError, match="overlaps"):
        make_trajectory(steps=[Step(start, end) for start, end in spans])


def test_a_prompt_begins_a_branch_and_a_branch_begins_with_what_was_given() -> None:
    def turns(*bounds: int) -> list[Turn]:
        return [Turn(start, end, Role.PROMPT) for start, end in pairwise(bounds)]

    assert make_trajectory(turns=()).branches == [(0, 8)]
    assert make_trajectory(turns=turns(0, 2, 4)).branches == [(0, 2), (2, 8)]
    for bad in (turns(5, 6), turns(2, 2, 3), turns(8, 8)):
        with pytest.raises(InvariantError, match="does not begin"):
            make_trajectory(turns=bad)


def test_the_oldest_version_counts_sampled_tokens_only() -> None:
    versions = np.array([-1, -1, -1, -1, 7, 7, 5, 9], np.int32)
    assert make_trajectory(versions=versions).oldest_version == 5


def test_labels_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InvariantError, match="not finite"):
        Labels("t", float("nan"), 0.0, "s")
    with pytest.raises(InvariantError, match="not finite"):
        Labels("t", 0.0, 0.0, "s", np.array([np.inf], np.float32), np.array([1], np.int32))


def test_step_scores_without_their_ends_are_refused() -> None:
    with pytest.raises(InvariantError, match="pair"):
        Labels("t", 0.0, 0.0, "s", np.ones(2, np.float32))


def test_a_plan_that_names_a_trajectory_twice_is_refused() -> None:
    with pytest.raises(InvariantError, match="twice"):
        BatchPlan(0, 0, ["a", "a"], ["g", "g"], [1, 1], [1, 1], [1.0, 1.0])


def test_impossible_sampling_and_tasks_are_refused() -> None:
    with pytest.raises(InvariantError, match="temperature"):
        Sampling(temperature=-1)
    with pytest.raises(InvariantError, match="no messages"):
        make_task(messages=[])
