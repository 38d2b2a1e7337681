"""The promises of the replay, one promise a test, on its core without sockets."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import RefusedError
from asyncrl.ids import held_out_row
from asyncrl.replay import protocol
from asyncrl.replay.labels.leases import LONGEST_LEASES
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from tests.helpers import make_task, make_trajectory
from tests.replay.support import Core, make_settings


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(tmp_path, make_settings())


def test_tickets_stop_at_the_capacity_and_go_on_after_a_publish(core: Core) -> None:
    for version, capacity in ((0, 8), (1, 12), (5, 28)):
        core.publish(version)
        core.tickets(100, holding=core.holding())
        assert len(core.holding()) == core.status()["capacity"] == capacity


def test_tasks_that_are_too_large_for_one_reply_come_in_several(tmp_path: Path) -> None:
    """A ground truth of megabytes, as of programs with their tests: one reply with all would be refused for ever."""
    truth = "x" * (10 << 20)
    feed = Feed([make_task(index, ground_truth=truth) for index in range(2)], seed=0, shuffle=False)
    core = Core(tmp_path, make_settings(feed=feed, admission=Admission(max_lag=1, per_version=8), batch_size=8))
    first = core.tickets(16)
    assert 0 < len(first) < 16
    assert core.tickets(16, holding=[]) == first, "a lost reply comes again in the same measure"
    tickets = list(first)
    while more := core.tickets(16 - len(tickets), holding=[ticket.id for ticket in tickets]):
        tickets += more
    assert len({ticket.id for ticket in tickets}) == 16
    core.deliver(tickets)
    scored = []
    while leased := core.lease():
        assert len(leased) < 16
        scored += leased
        for trajectory in leased:
            core.label(trajectory.id)
    assert len(scored) == 16


def test_the_task_of_an_episode_is_known_for_good(core: Core) -> None:
    tickets = core.tickets(8)
    core.deliver(tickets)
    core.label_all()
    plan = core.planned(0)
    core.checkpointed(1)
    for ticket in tickets:
        assert core.task(ticket.id) == ticket.task
    assert plan.ids
    with pytest.raises(RefusedError, match="are not stored"):
        core.fetch(plan.ids[:1])
    core.evaluate(0)
    held_out = core.tickets(100, holding=[])[-1]
    core.deliver([held_out])
    assert core.task(held_out.id) == held_out.task
    assert held_out.task.id not in {ticket.task.id for ticket in tickets}
    assert core.task("t000009999.0.0") is None


def test_a_trajectory_that_does_not_fit_its_ticket_is_refused(core: Core) -> None:
    ticket = core.tickets(1)[0]
    with pytest.raises(RefusedError, match="member 7"):
        core.put(make_trajectory(ticket, member=7))


def test_a_silent_actors_tickets_go_to_another_and_the_first_result_counts(core: Core) -> None:
    ticket = core.tickets(1)[0]
    core.tick(11)
    again = core.tickets(1, worker="b")[0]
    assert again.id == ticket.id
    assert core.put(make_trajectory(again)) == "stored"
    assert core.put(make_trajectory(ticket)) == "duplicate"


def test_a_restarted_actor_gets_its_old_tickets_at_once(core: Core) -> None:
    ticket = core.tickets(1)[0]
    assert core.tickets(1, life="2")[0].id == ticket.id


def test_a_restart_of_the_replay_takes_no_work_away(core: Core) -> None:
    ticket = core.tickets(1)[0]
    core.now += 100
    core.restart()
    core.tick(5)
    assert core.holding() == [ticket.id]


def test_groups_become_batches_only_when_whole_and_labelled(core: Core) -> None:
    tickets = core.tickets(4)
    for ticket in tickets[:3]:
        core.put(make_trajectory(ticket))
    core.label_all()
    assert core.plan(0) is None
    core.put(make_trajectory(tickets[3]))
    core.label(core.lease()[0].id)
    plan = core.planned(0)
    assert sorted(plan.ids) == sorted(ticket.id for ticket in tickets)


def test_a_group_beyond_the_age_bound_is_evicted_and_its_admission_given_back(core: Core) -> None:
    core.run_episodes(8, version=0)
    for step in range(2):
        core.planned(step)
    core.publish(2)
    old = core.run_episodes(4, version=0)
    committed = core.status()["committed"]
    assert core.plan(2) is None
    status = core.status()
    assert status["evicted"] == len(old) == 4
    assert status["committed"] == committed - 4
    assert status["tokens_thrown_away"] == 16
    assert status["tokens_evicted"] == 16
    assert status["tokens_accepted"] == status["tokens_labelled"] == 48


def test_a_failed_episode_is_replaced_and_its_group_dropped_whole_where_it_fails_too_often(core: Core) -> None:
    ticket, other = core.tickets(2)
    core.put(make_trajectory(other))
    core.fail(ticket.id)
    (replacement,) = core.tickets(1)
    assert (replacement.group_id, replacement.member) == (ticket.group_id, ticket.member)
    assert replacement.id != ticket.id
    core.fail(replacement.id)
    status = core.status()
    assert (status["dropped"], status["committed"], status["depth_groups"]) == (1, 0, 0)
    assert core.put(make_trajectory(ticket)) == "late"


def test_a_scoring_failure_is_tried_again_then_buried_and_never_a_zero(core: Core) -> None:
    ticket = core.tickets(1)[0]
    core.put(make_trajectory(ticket))
    for _ in range(2):
        core.scoring_failed(core.lease()[0].id)
    assert core.lease() == []
    status = core.status()
    assert (status["dead"], status["labelled"], status["depth_dead"]) == (1, 0, 1)
    assert core.tickets(1)[0].member == ticket.member


def test_a_lease_is_bounded_by_tokens_but_never_empty(core: Core) -> None:
    core.deliver(core.tickets(4), length=10)
    assert len(core.lease(tokens=25)) == 2
    assert len(core.lease(worker="t", tokens=1)) == 1


@pytest.mark.parametrize(("steps", "kept"), [(2, 0), (0, 2), (1 << 40, 1)])
def test_a_checkpoint_of_more_steps_than_were_planned_is_of_another_run_and_releases_nothing(
    core: Core, steps: int, kept: int
) -> None:
    core.run_episodes(4)
    core.plan(0)
    with pytest.raises(RefusedError, match=r"not of this run, which has planned 1"):
        core.checkpointed(steps, kept)
    assert (core.status()["trained"], core.status()["depth_data"]) == (0, 4)


def test_an_evaluation_runs_every_held_out_task_once_and_greedily(core: Core) -> None:
    for _ in range(2):
        core.evaluate(3)
    core.publish(4)
    tickets = core.tickets(6)[:3]
    assert [(t.temperature, t.min_version, t.purpose) for t in tickets] == [(0.0, 3, "eval")] * 3
    for ticket, version in zip(tickets, (3, 3, 5), strict=True):
        core.put(make_trajectory(ticket, version=version))
    for index, trajectory in enumerate(core.lease()):
        core.label(trajectory.id, index / 2)
    result = core.evaluation(3)
    assert (result["count"], result["failed"]) == (3, 0)
    assert (result["outcome"], result["accuracy"]) == (0.5, pytest.approx(1 / 3)), "outcomes of 0, 0.5 and 1"
    assert (result["tokens"], result["newer_tokens"], result["newest_version"]) == (12, 4, 5)


def evaluated(core: Core, version: int) -> list[str]:
    """Evaluate a version; the sample of its episodes."""
    core.evaluate(version)
    core.publish(version)
    for ticket in core.tickets(6):
        if ticket.purpose == "eval":
            core.put(make_trajectory(ticket, version=version))
    core.label_all(1.0)
    sample: list[str] = core.evaluation(version)["sample"]
    return sample


def test_of_each_evaluation_the_same_tasks_stay_to_be_read_and_old_ones_are_forgotten(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(evaluation_sample=2))
    samples = [evaluated(core, version) for version in range(5)]
    assert [[held_out_row(name.partition(".")[0]) for name in sample] for sample in samples] == [[0, 2]] * 5
    for version, sample in enumerate(samples):
        if version < 2:
            with pytest.raises(RefusedError):
                core.fetch(sample)
        else:
            assert [each.id for each in core.fetch(sample)] == sample
            assert [each.trajectory_id for each in core.labels(sample)] == sample
    with core.store.transaction(write=False) as tx:
        assert sum(name.startswith(b"e") for name in tx.keys("data")) == 6
    assert evaluated(Core(tmp_path / "other", make_settings()), 0) == []


def test_a_sample_of_an_evaluation_stays_when_a_resumed_run_no_longer_keeps_everything(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(evaluation_sample=2, keep_steps=math.inf))
    sample = evaluated(core, 0)
    core.restart(make_settings(evaluation_sample=2))
    assert [each.id for each in core.fetch(sample)] == sample
    with core.store.transaction(write=False) as tx:
        assert sum(name.startswith(b"e") for name in tx.keys("data")) == len(sample)


def test_half_of_an_actors_slots_are_for_training_while_there_is_any_to_do(core: Core) -> None:
    core.evaluate(0)
    assert [ticket.purpose for ticket in core.tickets(1)] == ["eval"]
    tickets = core.tickets(4)
    assert [ticket.purpose for ticket in tickets] == ["eval", "eval", "train", "train"]
    held = [ticket.id for ticket in tickets]
    assert [ticket.purpose for ticket in core.tickets(1, holding=held)] == ["eval"], "2 of 5 slots"
    core.evaluate(1)
    rest = [ticket.purpose for ticket in core.tickets(20, worker="b")]
    assert rest == ["eval"] * 3 + ["train"] * 6, "admission ends what training there is, and every evaluation is given"


def test_with_a_greedy_sibling_the_first_member_of_every_group_is_greedy(tmp_path: Path) -> None:
    tickets = Core(tmp_path, make_settings(greedy_sibling=True)).tickets(4)
    assert [(ticket.member, ticket.temperature) for ticket in tickets] == [(0, 0.0), (1, 1.0)] * 2


def test_a_failed_evaluation_task_counts_as_failed_not_as_wrong(core: Core) -> None:
    core.evaluate(0)
    given = core.tickets(6)
    tickets = given[:3]
    core.fail(tickets[0].id)
    core.fail(core.tickets(1, holding=[ticket.id for ticket in given[1:]])[0].id)
    for ticket in tickets[1:]:
        core.put(make_trajectory(ticket))
    core.label_all(1.0)
    result = core.evaluation(0)
    assert (result["accuracy"], result["count"], result["failed"]) == (1.0, 2, 1)


def test_several_attempts_at_a_held_out_task_are_sampled_and_end_one_by_one(tmp_path: Path) -> None:
    core = Core(
        tmp_path, make_settings(eval_attempts=3, admission=Admission(1, 0), max_attempts=1, keep_steps=math.inf)
    )
    core.evaluate(0)
    tickets = core.tickets(20)
    assert [ticket.task.id for ticket in tickets] == ["task-100", "task-101", "task-102"] * 3, "and nothing to train"
    assert {ticket.temperature for ticket in tickets} == {1.0}
    core.fail(tickets[0].id)
    for ticket in tickets[1:]:
        core.put(make_trajectory(ticket))
    core.label_all(0.5)
    result = core.evaluation(0)
    assert (result["outcome"], result["count"], result["failed"]) == (0.5, 8, 1)
    assert len(core.fetch([ticket.id for ticket in tickets[1:]])) == 8, "retention=all keeps them"


def waited(core: Core) -> tuple[float, float]:
    status = core.status()
    return status["learner_waited_for_episodes_s"], status["learner_waited_for_labels_s"]


def test_waiting_counts_for_episodes_until_they_are_there_and_for_labels_from_then_on(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(), lease_s=100.0)
    tickets = core.tickets(4)
    core.tick(5)
    assert waited(core) == (0, 0)
    assert core.plan(0) is None
    core.tick(2)
    core.deliver(tickets)
    core.tick(0)
    core.now += 3
    core.label_all()
    core.planned(0)
    core.tick(7)
    assert waited(core) == (2, 3)


def test_a_plan_says_what_its_trajectories_share_with_the_one_before_in_their_group(core: Core) -> None:
    for ticket in core.tickets(8):
        tokens = np.arange(8, dtype=np.int32)
        tokens[3 + ticket.member % 2 :] = 7 + ticket.member
        core.put(make_trajectory(ticket, tokens=tokens))
    core.label_all()
    plan = core.planned(0)
    members = [each.member for each in core.fetch(plan.ids)]
    expected = [3 if plan.group_ids[i] == plan.group_ids[i - 1] else 0 for i in range(1, len(members))]
    assert plan.shared == [0, *expected]
    assert 3 in plan.shared


def test_reuse_and_oversampling_together_admit_each_use_of_the_surplus():
    # Two uses of each of 4 trajectories a version, and of the half of a batch that is beyond it.
    admission = Admission(max_lag=1, per_version=4, uses=2, oversample=1.5)
    assert [admission.capacity(version) for version in (0, 3)] == [(1 + 2) * 4 + 2 * 2, (1 + 3 + 2) * 4 + 2 * 2]


def test_a_version_never_moves_backwards(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings())
    core.publish(3)
    core.publish(2)
    assert core.status()["version"] == 3


def test_a_scorer_that_renews_its_lease_and_finishes_nothing_loses_what_it_holds(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(), lease_s=10.0)
    core.deliver(core.tickets(1))
    (held,) = core.lease(worker="stuck")
    for _ in range(2 * LONGEST_LEASES):
        core.tick(5.0)
        core.ask(protocol.RenewLease("stuck"))
    assert core.lease(worker="other") == []
    for _ in range(3):
        core.tick(5.0)
        core.ask(protocol.RenewLease("stuck"))
    assert [each.id for each in core.lease(worker="other")] == [held.id]


def test_a_scorer_that_reports_a_failure_now_and_then_keeps_what_it_holds(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(max_attempts=3), lease_s=10.0)
    core.deliver(core.tickets(4))
    for held in core.lease(worker="slow"):
        for _ in range(LONGEST_LEASES):
            core.ask(protocol.RenewLease("slow"))
            core.tick(9.0)
        core.scoring_failed(held.id, worker="slow")
    assert (core.status()["scoring_failures"], core.status()["leases_redelivered"]) == (4, 0)


def test_what_is_forgotten_leaves_neither_data_nor_labels(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings())
    core.run_episodes(4)
    core.planned(0)
    core.checkpointed(1)
    with core.store.transaction(write=False) as tx:
        assert (tx.count("data"), tx.count("labels")) == (0, 0)


def test_an_episode_that_waits_has_its_whole_time_from_then_on(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(longest_episode_s=10.0), lease_s=100.0)
    (ticket,) = core.tickets(1)
    core.tick(8.0)
    core.tickets(0, holding=[ticket.id], waiting=[ticket.id])
    core.tick(8.0)
    assert core.holding() == [ticket.id]
    core.tick(8.0)
    assert core.holding() == []


def test_a_late_report_of_an_older_checkpoint_does_not_make_a_trained_step_untrained(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings())
    core.run_episodes(8)
    for step in range(2):
        core.planned(step)
    core.checkpointed(2)
    core.checkpointed(1)
    with pytest.raises(RefusedError, match="step 1 was trained"):
        core.skip(1)


def test_data_of_a_step_behind_the_oldest_kept_checkpoint_stays_until_that_is_a_newer_one(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings())
    core.run_episodes(8)
    core.planned(0)
    core.checkpointed(1)
    ids = core.planned(1).ids
    core.checkpointed(2, kept=1)
    assert [each.id for each in core.fetch(ids)] == ids
    core.checkpointed(2, kept=2)
    with pytest.raises(RefusedError, match="are not stored"):
        core.fetch(ids)


def test_an_episode_that_an_actor_held_over_a_restart_has_its_time_once_more_and_then_fails(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(longest_episode_s=10.0), lease_s=100.0)
    (ticket,) = core.tickets(1)
    core.tick(8.0)
    core.restart()
    core.tick(8.0)
    assert core.holding() == [ticket.id]
    core.tick(8.0)
    assert core.holding() == []
    assert core.status()["failures"] == 1


def test_a_ticket_that_waits_for_an_actor_has_not_been_held_for_too_long(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(longest_episode_s=10.0, max_attempts=3), lease_s=100.0)
    (ticket,) = core.tickets(1)
    core.put(make_trajectory(ticket))
    for _ in range(3):
        core.scoring_failed(core.lease()[0].id)
    (replacement,) = core.tickets(1)
    assert core.requeue(ticket.id) == "scoring"
    for _ in range(3):
        core.scoring_failed(core.lease()[0].id)
    core.tick(11.0)
    assert core.status()["failures"] == 0
    assert core.tickets(1)[0].id == replacement.id


def test_a_failure_that_is_reported_twice_counts_once_and_not_as_late(core: Core) -> None:
    (ticket,) = core.tickets(1)
    for _ in range(2):
        core.fail(ticket.id)
    assert (core.status()["failures"], core.status()["late"]) == (1, 0)


def test_the_audit_finds_each_trajectory_that_is_in_one_plan_too_many(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings())
    core.run_episodes(4)
    plan = core.planned(0)
    assert core.audit()["trained_twice"] == 0
    with core.store.transaction() as tx:
        tx.put("plans", 1, replace(plan, step=1))
    assert core.audit()["trained_twice"] == len(plan.ids)
