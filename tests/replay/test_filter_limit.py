"""Filters that refuse every group hold a run, and end it after a limit; a policy that solves everything is a result."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import TooManyFailuresError
from asyncrl.replay.filter_limit import FEWEST, FilterLimit
from asyncrl.replay.sampling import Filters
from tests.replay.support import Core, make_settings


def refuse(limit: FilterLimit, count: int, outcome: float, reason: str = "zero_variance") -> None:
    for _ in range(count):
        limit.refused(reason, [outcome] * 4)


def test_filters_hold_a_run_once_they_have_refused_the_groups_of_two_batches_in_a_row() -> None:
    limit = FilterLimit(batch_groups=8, limit=32)
    refuse(limit, 15, 0.0)
    assert limit.text() == ""
    limit.accepted()
    refuse(limit, 16, 0.0)
    assert limit.text() == (
        "replay.filter refused the last 16 groups, so that nothing can be trained: all scores in the group were equal "
        "(zero_variance), and the mean outcome was 0. To go on: use tasks that the policy solves sometimes, "
        "demonstrations first (`asyncrl sft`), a larger learner.group_size, or a reward with more levels"
    )
    limit.check()
    refuse(limit, 16, 0.0, "too_long")
    assert "all scores in the group were equal in 16 of them (zero_variance)" in limit.text()
    with pytest.raises(TooManyFailuresError, match=r"ends after 32 refused groups \(replay.filter.max_refused\)"):
        limit.check()
    limit.accepted()
    limit.check()
    assert limit.text() == ""


def test_a_policy_that_solves_every_task_is_said_to_be_a_result() -> None:
    limit = FilterLimit(batch_groups=2, limit=None)
    limit.accepted()
    refuse(limit, 99, 1.0)
    refuse(limit, 1, 0.0)
    assert limit.is_solved
    assert "the policy solves these tasks, since 99% of the groups were right in every member" in limit.text()
    limit.check()
    refuse(limit, 1, 1.0, "too_long")
    assert not limit.is_solved


def test_groups_that_were_right_from_the_start_on_are_no_result() -> None:
    limit = FilterLimit(batch_groups=2, limit=None)
    refuse(limit, 100, 1.0)
    assert not limit.is_solved
    assert "100% of the groups were right in every member, and the filters accepted none before" in limit.text()
    assert "try the rule with a wrong answer" in limit.text()


def test_a_replay_whose_filter_refuses_all_says_so_and_ends_the_run(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(filters=Filters(min_reward=2.0), max_refused_groups=12))
    for _ in range(2):
        core.run_episodes(FEWEST)
    assert core.service.failing()["refusing"].startswith(f"replay.filter refused the last {FEWEST} groups")
    assert core.service.failing()["solved"] == ""
    assert core.plan(0) is None
    core.run_episodes(FEWEST)
    with pytest.raises(TooManyFailuresError, match=r"the mean reward was below replay\.filter\.min_reward"):
        core.plan(0)
    core.restart()
    assert core.plan(0) is None
    assert core.service.failing()["refusing"] == ""
