"""Kinds of scores, leases that are lost, and dead letters that come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import RefusedError, StoreError
from asyncrl.wire import decode, read_labels, split
from tests.helpers import make_trajectory
from tests.replay.support import Core, make_settings


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(tmp_path, make_settings(needs=lambda source: ("rules", "prm")))


def put(core: Core, count: int = 2) -> list[str]:
    return core.deliver(core.tickets(count))


def test_a_trajectory_passes_through_the_kinds_in_order_and_is_complete_after_the_last(core: Core) -> None:
    ids = put(core)
    assert core.lease(serves=["prm"]) == []
    for trajectory in core.lease(serves=["rules"]):
        core.label(trajectory.id, 0.0)
    assert core.status()["labelled"] == 0
    assert core.lease(serves=["rules"]) == []
    assert sorted(each.id for each in core.lease(serves=["prm"])) == sorted(ids)
    for name in ids:
        core.label(name)
    assert (core.status()["labelled"], core.status()["depth_ready"]) == (2, 1)


def test_a_scorer_that_serves_all_kinds_does_them_in_one_lease(core: Core) -> None:
    put(core)
    leased = core.leased(10, serves=["rules", "prm"]).body
    assert [(each.kinds, each.final, each.partial) for each in leased] == [(("rules", "prm"), True, False)] * 2


def test_what_an_earlier_kind_found_is_given_to_the_later_one(core: Core) -> None:
    (name, _) = put(core)
    core.lease(1, serves=["rules"])
    core.label(name, 0.25)
    reply = core.leased(1, worker="t", serves=["prm"])
    (leased,) = reply.body
    assert (leased.kinds, leased.final, leased.partial) == (("prm",), True, True)
    assert read_labels(decode(split(reply.frames[1]))).reward == 0.25


def test_labels_of_a_scorer_that_lost_its_lease_are_late_and_change_nothing(core: Core) -> None:
    (name, _) = put(core)
    core.lease(1, worker="slow", serves=["rules"])
    core.tick(11)
    core.lease(1, worker="quick", serves=["rules"])
    core.label(name, worker="quick")
    assert core.status()["late_labels"] == 0
    core.label(name, worker="slow")
    assert core.status()["late_labels"] == 1


def test_what_a_dead_start_of_a_scorer_has_sent_takes_no_lease_from_its_next_start(core: Core) -> None:
    (name,) = put(core, 1)
    core.lease(life="1")
    assert [each.id for each in core.lease(life="2")] == [name]
    core.scoring_failed(name, life="1")
    core.label(name, life="1")
    with pytest.raises(RefusedError, match="a newer process of the worker s has replaced this one"):
        core.lease(life="1")
    assert core.lease(worker="other") == [], "the next start still holds it"
    assert (core.status()["late_labels"], core.status()["scoring_failures"]) == (1, 0)
    core.label(name, life="2")
    assert [each.id for each in core.lease(worker="other", serves=["prm"])] == [name]
    assert (core.status()["late_labels"], core.status()["leases_redelivered"]) == (1, 1)


def test_a_request_for_tickets_of_a_dead_start_takes_none_from_its_next_start(core: Core) -> None:
    held = [each.id for each in core.tickets(2, life="1")]
    assert [each.id for each in core.tickets(2, life="2")] == held
    with pytest.raises(RefusedError, match="a newer process of the worker a has replaced this one"):
        core.tickets(2, life="1")
    assert core.holding() == held


def test_an_episode_that_kills_its_scorers_becomes_a_dead_letter_and_takes_no_other_along(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(max_attempts=3))
    killer, *others = put(core, 4)
    for life in range(20):
        leased = [each.id for each in core.lease(life=str(life))]
        if killer not in leased:
            for name in leased:
                core.label(name, life=str(life))
    status = core.status()
    assert (status["dead"], status["labelled"], status["depth_dead"]) == (1, len(others), 1)


def dead_letter(core: Core) -> str:
    name = put(core, 1)[0]
    for _ in range(2):
        core.lease(serves=["rules"])
        core.scoring_failed(name)
    status = core.status()
    assert (status["dead"], status["tokens_dead"]) == (1, core.sampled_tokens("dead"))
    assert status["tokens_dead"] > 0
    return name


def test_a_requeued_dead_letter_whose_group_still_waits_is_scored_again_itself(core: Core) -> None:
    name = dead_letter(core)
    assert core.requeue(name) == "scoring"
    assert [each.id for each in core.lease(serves=["rules"])] == [name]
    status = core.status()
    assert (status["dead"], status["tokens_dead"], status["depth_dead"]) == (0, 0, 0)
    assert core.audit()["lost"] == 0


def test_a_requeued_dead_letter_of_a_closed_group_runs_its_task_again(core: Core) -> None:
    ticket = core.tickets(1)[0]
    core.fail(ticket.id)
    core.fail(core.tickets(1)[0].id)
    assert core.status()["depth_groups"] == 0
    assert core.requeue(ticket.id) == "task"
    again = core.tickets(1)[0]
    assert (again.task.id, again.group_id[0]) == (ticket.task.id, "r")
    with pytest.raises(RefusedError, match="no dead letter"):
        core.requeue(ticket.id)


def test_a_ticket_that_stands_in_the_queue_twice_is_held_by_one_actor(core: Core) -> None:
    name = dead_letter(core)
    assert core.requeue(name) == "scoring"
    for _ in range(2):
        core.lease(serves=["rules"])
        core.scoring_failed(name)
    (first,), (second,) = core.tickets(1, worker="a"), core.tickets(1, worker="b")
    assert first.id != second.id
    core.put(make_trajectory(first))
    core.tick(11)
    assert core.tickets(1, worker="c")[0].id == second.id


def test_lost_replies_to_leases_are_no_attempts(core: Core) -> None:
    (name, _) = put(core)
    for _ in range(10):
        assert name in [each.id for each in core.lease(serves=["rules"])]
    assert core.status()["dead"] == 0


def test_a_store_is_not_served_under_other_groups_or_shards(tmp_path: Path) -> None:
    Core(tmp_path, make_settings()).store.close()
    with pytest.raises(StoreError, match="group_size was 2 and is 4"):
        Core(tmp_path, make_settings(group_size=4))


def test_an_episode_whose_scoring_failed_is_leased_alone_behind_those_that_are_new(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(max_attempts=3))
    failed, *others = put(core, 3)
    core.lease(1)
    core.scoring_failed(failed)
    assert [each.id for each in core.lease()] == others
    assert [each.id for each in core.lease(worker="other")] == [failed]
