"""Labels without what the algorithm reads never get into a plan: neither new ones, nor those of before it changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.schema.scoring import GROUP_KIND
from asyncrl.errors import RefusedError
from asyncrl.ids import is_evaluation
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from asyncrl.types import LabelNeeds, Labels
from tests.helpers import make_labels, make_task
from tests.replay.support import Core, make_settings

STYLE = LabelNeeds(("rule/f/style",))


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(tmp_path, make_settings())


def styled(name: str, reward: float = 1.0) -> Labels:
    return replace(make_labels(name, reward), extra={"rule/f": reward, "rule/f/style": 0.5})


def label_styled(core: Core) -> None:
    for trajectory in core.lease():
        core.put_labels(styled(trajectory.id))


def test_labels_without_a_score_that_the_algorithm_reads_are_refused_and_change_nothing(core: Core) -> None:
    core.require(STYLE)
    (name, other) = core.deliver(core.tickets(2))
    core.lease()
    with pytest.raises(RefusedError, match=rf"^{name} cannot be trained: .*but the labels have \[\]"):
        core.label(name)
    core.put_labels(styled(name))
    core.put_labels(styled(other))
    assert (core.status()["labelled"], core.status()["depth_ready"]) == (2, 1)


def test_an_episode_whose_rule_never_gives_the_score_is_a_dead_letter_and_its_group_is_completed(core: Core) -> None:
    core.require(STYLE)
    (name, other) = core.deliver(core.tickets(2))
    core.lease()
    core.put_labels(styled(other))
    for _ in range(2):
        with pytest.raises(RefusedError) as refused:
            core.label(name)
        core.scoring_failed(name, reason=str(refused.value))
        core.lease()
    (dead,) = core.dead_letters().values()
    assert "the algorithm reads the scores ['rule/f/style']" in dead.reason
    assert (core.status()["dead"], core.status()["scoring_failures"]) == (1, 2)
    (again,) = core.deliver(core.tickets(1))
    label_styled(core)
    core.deliver(core.tickets(2))
    label_styled(core)
    plan = core.planned(0)
    assert again in plan.ids
    assert name not in plan.ids
    assert all("rule/f/style" in labels.extra for labels in core.labels(plan.ids))


def test_labels_of_a_group_that_was_scored_whole_are_refused_whole(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(needs=lambda source: (GROUP_KIND,)))
    core.require(STYLE)
    ids = core.deliver(core.tickets(2))
    core.lease(serves=[GROUP_KIND])
    with pytest.raises(RefusedError, match=rf"^{ids[1]} cannot be trained"):
        core.put_group_labels([styled(ids[0]), make_labels(ids[1])])
    assert core.status()["labelled"] == 0
    core.put_group_labels([styled(name) for name in ids])
    assert core.status()["labelled"] == 2


def test_only_the_last_kind_of_scores_must_have_it(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(needs=lambda source: ("rules", "prm")))
    core.require(STYLE)
    (name,) = core.deliver(core.tickets(1))
    core.lease(serves=["rules"])
    core.label(name)
    core.lease(serves=["prm"])
    with pytest.raises(RefusedError, match="cannot be trained"):
        core.label(name)


def test_step_scores_beyond_1_are_refused_where_the_algorithm_cannot_take_them(core: Core) -> None:
    core.require(LabelNeeds(unit_steps=True))
    (name,) = core.deliver(core.tickets(1))
    (trajectory,) = core.lease()
    ends = np.array([trajectory.steps[-1].end], np.int32)

    def scored(score: float) -> Labels:
        return replace(make_labels(name), step_scores=np.array([score], np.float32), step_ends=ends)

    with pytest.raises(RefusedError, match=r"step scores reach 1\.5, but the algorithm needs step scores in \[-1, 1\]"):
        core.put_labels(scored(-1.5))
    core.put_labels(scored(-1.0))
    assert core.status()["labelled"] == 1


@pytest.mark.parametrize("kind", ["rules", GROUP_KIND])
def test_an_episode_that_is_damaged_before_its_step_scores_come_is_replaced(tmp_path: Path, kind: str) -> None:
    core = Core(tmp_path, make_settings(needs=lambda source: (kind,)))
    tickets = core.tickets(2)
    core.deliver(tickets)
    leased = core.lease(serves=[kind])
    core.damage(leased[1].id)
    ends = np.array([leased[0].steps[-1].end], np.int32)
    labels = [replace(make_labels(each.id), step_scores=np.ones(1, np.float32), step_ends=ends) for each in leased]
    if kind == GROUP_KIND:
        core.put_group_labels(labels)
    else:
        for each in labels:
            core.put_labels(each)
    status = core.status()
    assert (status["damaged"], status["labelled"]) == (1, kind == "rules")
    (replacement,) = core.tickets(1)
    assert (replacement.group_id, replacement.member) == (tickets[1].group_id, tickets[1].member)
    core.deliver([replacement])
    assert len(core.lease(serves=[kind])) == (2 if kind == GROUP_KIND else 1)


def test_an_evaluation_needs_no_score_of_the_algorithm(core: Core) -> None:
    core.require(STYLE)
    core.evaluate(0)
    core.deliver(core.tickets(7))
    for trajectory in core.lease():
        if is_evaluation(trajectory.id):
            core.label(trajectory.id)
    assert core.evaluation(0)["count"] == 3


def test_what_the_algorithm_reads_is_known_after_a_restart(core: Core) -> None:
    core.require(STYLE)
    core.restart()
    (name,) = core.deliver(core.tickets(1))
    core.lease()
    with pytest.raises(RefusedError, match="cannot be trained"):
        core.label(name)


def test_stored_episodes_without_a_score_that_is_read_from_now_on_are_dead_letters_and_never_planned(
    tmp_path: Path,
) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=3, per_version=4)))
    core.run_episodes(4)
    recorded = core.planned(0)
    ready = core.run_episodes(2)
    labelled, waiting = core.deliver(core.tickets(2))
    core.lease(1)
    core.label(labelled)
    with_style = core.deliver(core.tickets(2))
    unlabelled = [each.id for each in core.lease()]
    for name in with_style:
        core.put_labels(styled(name))
    assert unlabelled == [waiting, *with_style]
    for _ in range(2):
        core.require(STYLE)
        dead = core.dead_letters()
        assert sorted(dead) == sorted([*ready, labelled])
        assert all("reads the scores ['rule/f/style']" in each.reason for each in dead.values())
        assert (core.status()["dead"], core.status()["dropped"]) == (3, 1)
    assert core.plan(0) == recorded, "a recorded plan stays as it is: its step has the algorithm of before"
    assert core.plan(1) is None
    core.label(waiting)
    assert core.status()["late_labels"] == 1, "its group is dropped"
    core.deliver(core.tickets(2))
    label_styled(core)
    assert set(with_style) < set(core.planned(1).ids)
    assert core.audit()["lost"] == 0


def test_a_dead_letter_of_before_runs_its_task_again(core: Core) -> None:
    (name, _) = core.run_episodes(2)
    core.require(STYLE)
    assert core.requeue(name) == "task"
    assert core.status()["depth_again"] == 1


def test_a_group_that_a_plan_has_used_is_not_used_again_and_its_episodes_are_no_dead_letters(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=3, per_version=4, uses=2)))
    core.run_episodes(4)
    plan = core.planned(0)
    core.require(STYLE)
    assert core.status()["dead"] == 0
    assert core.plan(0) == plan
    assert core.status()["depth_ready"] == 0
    assert core.audit()["lost"] == 0


def test_a_plan_that_other_shards_do_not_have_yet_is_made_again_of_labels_that_meet_the_needs(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=3, per_version=4)))
    before = core.run_episodes(4)
    assert sorted(core.planned(0).ids) == sorted(before)
    for _ in range(2):
        core.require(STYLE, first=0)
        assert core.plan(0) is None
        assert sorted(core.dead_letters()) == sorted(before)
    after = core.deliver(core.tickets(4))
    label_styled(core)
    assert sorted(core.planned(0).ids) == sorted(after)
    assert core.audit()["lost"] == 0


@pytest.mark.parametrize(("uses", "demonstrated"), [(1, False), (2, False), (1, True)])
def test_new_episodes_take_the_place_of_those_in_a_plan_that_was_withdrawn(
    uses: int, demonstrated: bool, tmp_path: Path
) -> None:
    """Otherwise the synchronous run would have no ticket left, and wait for ever."""
    shown = [{"role": "assistant", "content": "1"}] if demonstrated else []
    feed = Feed([make_task(index, demonstration=shown) for index in range(5)], seed=0, shuffle=True)
    core = Core(tmp_path, make_settings(admission=Admission(0, 4, uses), feed=feed))
    before = core.run_episodes(100)
    core.planned(0)
    core.require(STYLE, first=0)
    after = core.deliver(core.tickets(100))
    assert len(after) == len(before)
    label_styled(core)
    assert set(core.planned(0).ids) <= set(after)
