"""A task with a demonstration has it as one more member of each of its groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import RefusedError, StoreError
from asyncrl.replay.batches.sampling import Filters
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Band, Feed
from asyncrl.types import Ticket
from tests.helpers import make_demonstration, make_task, make_trajectory
from tests.replay.support import Core, make_settings

SHOWN = [{"role": "assistant", "content": "1"}]


def settings(**changes: Any) -> Any:
    """Groups of two, and batches of two groups; every second task has a demonstration."""
    tasks = [make_task(index, demonstration=[] if index % 2 else SHOWN) for index in range(4)]
    return make_settings(**{"feed": Feed(tasks, seed=0, shuffle=False), **changes})


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(tmp_path, settings())


def test_only_the_last_ticket_of_a_group_has_the_demonstration(core: Core) -> None:
    tickets = core.tickets(5)
    assert [(each.task.id, each.member, bool(each.task.demonstration)) for each in tickets] == [
        ("task-0", 0, False),
        ("task-0", 1, False),
        ("task-0", 2, True),
        ("task-1", 0, False),
        ("task-1", 1, False),
    ]
    core.deliver(tickets)
    assert not any(each.task.demonstration for each in core.leased().body if each.task is not None)


def test_the_plan_says_which_of_its_trajectories_are_demonstrations(core: Core) -> None:
    core.run_episodes(5)
    plan = core.planned(0)
    assert len(plan.ids) == 5
    assert [core.fetch([plan.ids[index]])[0].member for index in plan.demonstrations] == [2]


def test_admission_counts_the_members_that_are_played_and_lets_as_many_of_them_run_as_without(tmp_path: Path) -> None:
    core = Core(tmp_path, settings())
    tickets = core.tickets(100)
    played = [ticket for ticket in tickets if not ticket.task.demonstration]
    assert len(played) == core.status()["committed"] == core.status()["capacity"] == 8
    assert len(tickets) == 10


def test_a_group_that_is_thrown_away_gives_back_what_it_was_admitted_with(core: Core) -> None:
    failing, *others = core.tickets(3)
    assert core.status()["committed"] == 2
    core.fail(failing.id)
    (again,) = core.tickets(1, holding=[each.id for each in others])
    assert again.member == failing.member
    core.fail(again.id)
    assert core.status()["committed"] == 0


def test_a_group_is_as_old_as_its_oldest_played_member_and_a_demonstration_never_gets_old(tmp_path: Path) -> None:
    core = Core(tmp_path, settings(admission=Admission(max_lag=0, per_version=4)))
    tickets = core.tickets(5)
    core.deliver(tickets, version=0)
    core.label_all()
    core.publish(1)
    assert core.status()["evicted"] == 5
    assert core.status()["committed"] == 0
    again = core.tickets(5)
    # The demonstration came with an old version of the policy; only the played members have an age.
    core.deliver(again, version=1)
    core.label_all()
    core.publish(1)
    assert core.status()["evicted"] == 5
    assert core.audit()["largest_lag"] == 0


@pytest.mark.parametrize("shown", [True, False])
def test_an_episode_in_place_of_a_demonstration_is_refused_and_the_other_way_round(core: Core, shown: bool) -> None:
    tickets = core.tickets(3)
    wrong = make_demonstration(tickets[0]) if shown else make_trajectory(tickets[2])
    with pytest.raises(RefusedError, match=", but its ticket is for "):
        core.put(wrong)


def test_a_group_waits_for_its_demonstration_and_for_the_score_of_it(core: Core) -> None:
    tickets = core.tickets(5)
    core.deliver([ticket for ticket in tickets if not ticket.task.demonstration])
    core.label_all()
    assert core.plan(0) is None
    core.deliver([ticket for ticket in tickets if ticket.task.demonstration])
    assert core.plan(0) is None
    core.label_all()
    assert core.plan(0) is not None


def test_after_a_kill_of_the_replay_no_demonstration_is_lost_or_trained_twice(core: Core) -> None:
    held = core.tickets(5)
    core.restart()
    assert [each.id for each in core.tickets(5, holding=[])] == [each.id for each in held]
    core.deliver(held)
    core.restart()
    assert core.put(make_demonstration(held[2])) == "duplicate"
    core.label_all()
    plan = core.planned(0)
    core.restart()
    assert core.planned(0) == plan
    core.checkpointed(1)
    audit = core.audit()
    assert (audit["lost"], audit["trained_twice"], audit["planned"], audit["states"]) == (0, 0, 5, {"trained": 5})


def _reward(core: Core, tickets: list[Ticket], played: float, shown: float) -> None:
    core.deliver(tickets)
    rewards = {ticket.id: shown if ticket.task.demonstration else played for ticket in tickets}
    for trajectory in core.lease():
        core.label(trajectory.id, rewards[trajectory.id])


def test_the_success_rate_of_a_task_is_that_of_what_was_played(tmp_path: Path) -> None:
    tasks = [make_task(0, demonstration=SHOWN), make_task(1)]
    feed = Feed(tasks, seed=0, shuffle=False, band=Band(0.1, 0.9, 100))
    core = Core(tmp_path, settings(feed=feed))
    _reward(core, core.tickets(3), played=0, shown=1)
    # Never solved: with the demonstration in it, the rate would be a third, and the task within the band.
    assert {ticket.task.id for ticket in core.tickets(6, holding=[])} == {"task-1"}


@pytest.mark.parametrize(
    ("filters", "reason"),
    [
        (Filters(min_reward=0.2), "filtered/reward_low"),
        (Filters(zero_variance=True), None),
        (Filters(max_reward=0.1), None),
        # Without `zero_variance` no score is compared.
        (Filters(score="rule/exact_number"), None),
    ],
)
def test_filters_of_the_mean_see_what_was_played_and_that_of_variance_sees_all(
    tmp_path: Path, filters: Filters, reason: str | None
) -> None:
    core = Core(tmp_path, settings(filters=filters))
    _reward(core, core.tickets(3), played=0, shown=1)
    assert {name for name in core.status() if name.startswith("filtered/")} == ({reason} if reason else set())


def test_a_file_whose_demonstrations_have_changed_is_refused(core: Core) -> None:
    core.tickets(3)
    changed = [
        make_task(index, demonstration=[] if index % 2 else [{**SHOWN[0], "content": "2"}]) for index in range(4)
    ]
    with pytest.raises(StoreError, match="same number of tasks, but"):
        core.restart(settings(feed=Feed(changed, seed=0, shuffle=False)))
