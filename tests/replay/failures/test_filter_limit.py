"""Filters that refuse every group hold a run, and end it after a limit; a policy that solves everything is a result."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import TasksSolvedError, TooManyFailuresError
from asyncrl.replay.batches.sampling import Filters
from asyncrl.replay.failures.filter_limit import EPISODES, FEWEST, FilterLimit
from tests.helpers import make_labels, make_played
from tests.replay.support import Core, ReplayThread, make_settings


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
    refuse(limit, 14, 0.0, "too_long")
    assert "all scores in the group were equal in 16 of them (zero_variance)" in limit.text()
    refuse(limit, 16, 0.0, "too_long")
    limit.check()
    refuse(limit, 1, 0.0, "too_long")
    with pytest.raises(TooManyFailuresError, match=r"ends after 47 refused groups \(replay.filter.max_refused=32, "):
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
    refuse(limit, 4, 1.0, "too_long")
    assert limit.is_solved, "a few groups of another reason change nothing"
    refuse(limit, 2, 1.0, "too_long")
    assert not limit.is_solved


@pytest.mark.parametrize("resumes", [False, True])
def test_a_policy_that_solves_every_task_ends_the_run_with_this_result_also_after_a_resume(resumes: bool) -> None:
    limit = FilterLimit(batch_groups=2, limit=32)
    if resumes:
        limit.resume(has_planned=True, above_1=False)
    else:
        limit.accepted()
    refuse(limit, 31, 1.0)
    limit.check()
    refuse(limit, 1, 1.0)
    with pytest.raises(TasksSolvedError, match=r"the policy solves these tasks.*after 32 refused .*max_refused=32\)$"):
        limit.check()


def test_groups_that_failed_alike_count_by_their_members_since_successes_may_be_rare() -> None:
    for members, most in ((4, 320), (8, 160), (EPISODES, 32), (2 * EPISODES, 32)):
        limit = FilterLimit(batch_groups=2, limit=32)
        for _ in range(most - 1):
            limit.refused("zero_variance", [0.0] * members)
        limit.check()
        limit.refused("reward_low", [0.0] * members)
        with pytest.raises(TooManyFailuresError, match=rf"ends after {most} refused groups"):
            limit.check()
    assert (1 - 1 / 1000) ** (256 * EPISODES) < 1e-4, "the default limit lets a task with rare successes go on"


@pytest.mark.parametrize(
    ("reason", "outcomes"),
    [("zero_variance", [1.0] * 4), ("too_long", [0.0] * 4), ("reward_high", [0.5] * 4), ("reward_low", [0.0, 0.1])],
)
def test_groups_that_no_lucky_episode_would_save_count_whole(reason: str, outcomes: list[float]) -> None:
    limit = FilterLimit(batch_groups=2, limit=32)
    for _ in range(31):
        limit.refused(reason, outcomes)
    limit.check()
    limit.refused(reason, outcomes)
    with pytest.raises(TooManyFailuresError, match=r"ends after 32 refused groups \(replay.filter.max_refused=32\)\."):
        limit.check()


def test_groups_that_were_right_from_the_start_on_are_no_result() -> None:
    limit = FilterLimit(batch_groups=2, limit=None)
    refuse(limit, 100, 1.0)
    assert not limit.is_solved
    assert "100% of the groups were right in every member, and the filters accepted none before" in limit.text()
    assert "try the rule with a wrong answer" in limit.text()


def test_an_outcome_of_1_is_no_result_where_outcomes_were_above_1(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(filters=Filters(zero_variance=True), max_refused_groups=FEWEST))

    def play(*outcomes: float) -> None:
        core.deliver(core.tickets(4))
        for index, each in enumerate(core.lease()):
            core.label(each.id, outcomes[index % 2])

    play(1.0, 7.0)
    core.planned(0)
    core.publish(1)
    core.restart()
    for _ in range(FEWEST):
        play(1.0, 1.0)
    assert core.service.failing()["solved"] == ""
    with pytest.raises(TooManyFailuresError, match="may solve the tasks, or give only answers of one value"):
        core.plan(1)


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


def test_a_replay_that_resumes_a_trained_run_knows_that_its_filter_accepted_groups(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(filters=Filters(zero_variance=True), max_refused_groups=FEWEST))
    core.deliver(core.tickets(4))
    for index, each in enumerate(core.lease()):
        core.label(each.id, float(index % 2))
    core.planned(0)
    core.publish(1)
    core.restart()
    for _ in range(4):
        core.run_episodes(4)
    assert core.service.failing()["refusing"] == ""
    assert "the policy solves these tasks" in core.service.failing()["solved"]
    with pytest.raises(TasksSolvedError):
        core.plan(1)


def test_a_learner_is_told_that_the_tasks_are_solved(tmp_path: Path) -> None:
    settings = make_settings(filters=Filters(zero_variance=True), max_refused_groups=FEWEST)
    with ReplayThread(tmp_path, settings) as replay:
        actor, scorer, learner = replay.client("a"), replay.client("s"), replay.client("l")

        def play(count: int, *rewards: float) -> None:
            for _ in range(0, count, 4):
                actor.put_all([make_played(ticket) for ticket in actor.tickets([], 4)])
                leases = scorer.lease(["rules"], 4, 1 << 20)
                scorer.label([make_labels(each.trajectory.id, rewards[i % 2]) for i, each in enumerate(leases)])

        play(4, 0.0, 1.0)
        assert learner.plan(0)
        learner.published(1)
        play(2 * FEWEST, 1.0, 1.0)
        with pytest.raises(TasksSolvedError, match="the policy solves these tasks"):
            learner.plan(1)
