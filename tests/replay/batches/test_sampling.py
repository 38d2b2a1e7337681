"""Samplers, reuse, filters, oversampling and retention: what is trained, how often, and what is kept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import RefusedError
from asyncrl.replay.batches.sampling import Fifo, Filters, Freshest, Oldest, Prioritised
from asyncrl.replay.counters import unreported
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.store.records import ReadyGroup, TrajectoryRecord
from asyncrl.types import Labels
from tests.helpers import make_trajectory
from tests.replay.support import Core, make_settings

READY = [ReadyGroup("a", 2, 0.0), ReadyGroup("b", 2, 0.25), ReadyGroup("c", 0, 0.5)]


def names(chosen: Sequence[tuple[int, float]]) -> list[str]:
    return [READY[index].name for index, _ in chosen]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_fifo_takes_what_was_complete_first_oldest_what_is_oldest_and_freshest_what_is_newest() -> None:
    assert names(Fifo().choose(READY, 2, rng())) == ["a", "b"]
    assert names(Oldest().choose(READY, 2, rng())) == ["c", "a"]
    assert [index for index, _ in Freshest().choose(READY[::-1], 2, rng())] == [1, 2]


@pytest.mark.slow
def test_priorities_follow_the_power_of_the_spread() -> None:
    sampler = Prioritised(alpha=1.0, beta=1.0)
    drawn = Counter(names(sampler.choose(READY, 1, rng(seed)))[0] for seed in range(3000))
    assert drawn["c"] / drawn["b"] == pytest.approx(2.0, rel=0.15)
    assert drawn["a"] < 30


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.5), (0.0, 1.0)])
def test_importance_weights_are_those_of_the_paper(alpha: float, beta: float) -> None:
    chosen = Prioritised(alpha, beta).choose(READY, 3, rng())
    powers = [max(each.spread, 1e-3) ** alpha for each in READY]
    raw = [(3 * power / sum(powers)) ** -beta for power in powers]
    assert {index: pytest.approx(weight) for index, weight in chosen} == {
        index: weight / max(raw) for index, weight in enumerate(raw)
    }


def test_a_prioritised_plan_records_its_weights_and_hands_them_out_again(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(sampler=Prioritised(1.0, 1.0), admission=Admission(3, 4)))
    core.run_episodes(16)
    plan = core.planned(0)
    assert max(plan.weights) == 1.0
    core.restart()
    assert core.plan(0) == plan


def test_a_group_is_in_as_many_plans_as_allowed_and_trained_once_they_are_covered(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(4, 4, uses=2)))
    core.run_episodes(100)
    plans = [core.plan(step) for step in range(3)]
    times = Counter(name for plan in plans if plan for name in plan.ids)
    assert max(times.values()) == 2
    core.checkpointed(1)
    assert core.status()["trained"] == 0
    core.checkpointed(2)
    assert core.status()["trained"] == sum(count == 2 for count in times.values()) == 4
    audit = core.audit()
    assert (audit["lost"], audit["trained_twice"]) == (0, 0)


def test_reuse_promises_as_many_uses_as_training_takes(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(0, 4, uses=2)))
    assert len(core.run_episodes(100)) == 4
    core.planned(0)
    core.publish(1)
    assert core.status()["committed"] == 4
    assert len(core.run_episodes(100, version=1)) == 4
    core.planned(1)


def run_with_rewards(core: Core, *rewards: float) -> None:
    for ticket, reward in zip(core.tickets(len(rewards)), rewards, strict=True):
        core.put(make_trajectory(ticket))
        core.label_all(reward)


def test_filtered_groups_are_counted_by_reason_and_replaced(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(filters=Filters(zero_variance=True), admission=Admission(0, 4)))
    core.run_episodes(4)
    status = core.status()
    assert (status["filtered"], status["filtered/zero_variance"], status["committed"]) == (4, 2, 0)
    assert core.plan(0) is None
    run_with_rewards(core, 0.0, 1.0, 0.0, 1.0)
    core.planned(0)


@pytest.mark.parametrize(
    ("filters", "reason"),
    [
        (Filters(min_reward=0.9), "reward_low"),
        (Filters(max_reward=0.1), "reward_high"),
        (Filters(max_tokens=7), "too_long"),
    ],
)
def test_rewards_out_of_range_and_long_members_are_filtered(tmp_path: Path, filters: Filters, reason: str) -> None:
    core = Core(tmp_path, make_settings(filters=filters))
    run_with_rewards(core, 0.0, 1.0)
    assert core.status()[f"filtered/{reason}"] == 1


@pytest.mark.parametrize(
    ("score", "rewards", "outcomes", "kept"),
    [
        # All wrong, and one too long; all right, and one too long; one right, whose penalty makes the rewards equal.
        ("outcome", [0, -0.1], [0, 0], False),
        ("outcome", [1, 0.5], [1, 1], False),
        ("outcome", [0, 0], [1, 0], True),
        ("reward", [0, -0.1], [0, 0], True),
        ("reward", [1, 0.5], [1, 1], True),
        ("reward", [0, 0], [1, 0], False),
    ],
)
def test_groups_are_compared_by_their_outcomes_or_by_their_rewards(
    tmp_path: Path, score: str, rewards: list[float], outcomes: list[float], kept: bool
) -> None:
    core = Core(tmp_path, make_settings(filters=Filters(zero_variance=True, score=score)))
    ids = core.deliver(core.tickets(2))
    core.lease()
    for name, reward, outcome in zip(ids, rewards, outcomes, strict=True):
        core.put_labels(Labels(name, reward, outcome, "test"))
    status = core.status()
    assert (status["depth_ready"], status.get("filtered/zero_variance", 0)) == ((1, 0) if kept else (0, 1))


@pytest.mark.parametrize(("scores", "kept"), [([0.5, 0.5], False), ([0.5, 1.0], True)])
def test_groups_may_be_compared_by_any_score_of_the_labels(tmp_path: Path, scores: list[float], kept: bool) -> None:
    core = Core(tmp_path, make_settings(filters=Filters(zero_variance=True, score="rule/mine/style")))
    ids = core.deliver(core.tickets(2))
    core.lease()
    for name, score in zip(ids, scores, strict=True):
        core.put_labels(Labels(name, float(score > 0.5), 1.0, "test", extra={"rule/mine/style": score}))
    status = core.status()
    assert (status["depth_ready"], status.get("filtered/zero_variance", 0)) == ((1, 0) if kept else (0, 1))


def test_labels_without_the_score_that_the_filter_compares_are_refused(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(filters=Filters(zero_variance=True, score="rule/mine/style")))
    name, _ = core.deliver(core.tickets(2))
    core.lease()
    with pytest.raises(
        RefusedError, match=r"replay.filter.score=rule/mine/style: the labels have only \['rule/mine'\]"
    ):
        core.put_labels(Labels(name, 1.0, 1.0, "test", extra={"rule/mine": 1.0}))


def test_labels_that_are_older_than_the_filter_let_their_group_through(tmp_path: Path) -> None:
    labels = [Labels("a", 1.0, 1.0, "test"), Labels("b", 1.0, 1.0, "test")]
    core = Core(tmp_path, make_settings())
    ids = core.deliver(core.tickets(2))
    core.lease()
    core.put_labels(replace(labels[0], trajectory_id=ids[0]))
    core.restart(make_settings(filters=Filters(zero_variance=True, score="x")))
    core.lease()
    core.put_labels(replace(labels[1], trajectory_id=ids[1], extra={"x": 1.0}))
    assert core.status()["depth_ready"] == 1


def test_oversampling_starts_more_episodes_and_what_is_left_over_is_evicted_by_age(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(0, 4, oversample=1.5)))
    assert len(core.run_episodes(100)) == 6
    core.planned(0)
    core.publish(1)
    assert core.status()["evicted"] == 2
    assert len(core.run_episodes(100, version=1)) == 6


def test_an_evicted_groups_task_runs_again_where_the_rules_say_so(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(reissue_evicted=True, admission=Admission(0, 4, oversample=1.5)))
    tasks = [ticket.task.id for ticket in core.tickets(6)]
    for name in core.holding():
        core.put(make_trajectory(id=name, group_id=name.split(".")[0], member=int(name.split(".")[1])))
    core.label_all()
    core.planned(0)
    core.publish(1)
    again = core.tickets(2)
    assert [ticket.task.id for ticket in again] == tasks[4:]
    assert again[0].group_id.startswith("r")


@pytest.mark.parametrize(
    ("keep", "covered", "kept"), [(0, 2, 0), (1, 2, 4), (math.inf, 2, 8), (0, 1, 4), (1, 0, 8), (math.inf, 0, 8)]
)
def test_what_is_trained_is_kept_for_as_long_as_the_rules_and_the_kept_checkpoints_say(
    tmp_path: Path, keep: float, covered: int, kept: int
) -> None:
    core = Core(tmp_path, make_settings(keep_steps=keep))
    core.run_episodes(8)
    first, _ = core.planned(0), core.planned(1)
    for _ in range(2):
        core.checkpointed(2, covered)
        status = core.status()
        assert (status["trained"], status["depth_data"]) == (8, kept)
    if kept < 8:
        with pytest.raises(RefusedError, match="are not stored: trained"):
            core.fetch(first.ids)


def test_keep_all_keeps_what_was_not_trained_with_its_reason_until_the_run_goes_on_with_less(tmp_path: Path) -> None:
    keep = make_settings(
        keep_steps=math.inf,
        max_dead_letters=1,
        max_attempts=1,
        filters=Filters(max_reward=1.0),
        admission=Admission(0, 8),
    )
    core = Core(tmp_path, keep)
    evicted, filtered, dead = core.deliver(core.tickets(6))[::2]
    for trajectory in core.lease(4):
        core.label(trajectory.id, 2.0 if trajectory.group_id in filtered else 1.0)
    for trajectory in core.lease():
        core.scoring_failed(trajectory.id)
    core.publish(1)
    core.evaluate(1)
    core.fail(core.tickets(1)[0].id)
    (held_out,) = core.deliver(core.tickets(1), version=1)
    core.label_all()

    def kept() -> dict[str, tuple[str, str]]:
        with core.store.transaction(write=False) as tx:
            found = dict(TrajectoryRecord.all(tx))
            return {name: (found[name].state, found[name].reason) for name in found if tx.get_bytes("data", name)}

    ends = kept()
    assert ends[evicted] == ("evicted", "sampled by version 0: too old for version 1 (replay.max_lag)")
    assert ends[filtered] == ("filtered", "reward_high")
    assert ends[dead] == ("dead", "scoring: nonsense")
    assert ends[held_out] == ("evaluated", "")
    assert len(ends) == 7
    assert dead not in core.dead_letters()
    core.restart()
    assert kept() == ends
    core.store.close()
    assert Core(tmp_path, make_settings(max_attempts=1)).status()["depth_data"] == 0


@pytest.mark.slow
def test_a_full_store_of_kept_trajectories_stops_tickets_rather_than_dropping(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(keep_steps=math.inf, high_water_bytes=300_000))
    trained = 0
    for step in range(1000):
        if len(core.run_episodes(4, version=step)) < 4:
            break
        core.planned(step)
        core.checkpointed(step + 1)
        core.publish(step + 1)
        trained += 4
    else:
        pytest.fail("the high-water mark was never reached")
    assert core.status()["depth_data"] == core.status()["accepted"] >= trained > 0


def test_a_plan_is_handed_out_ahead_only_if_it_would_be_the_same_later(tmp_path: Path) -> None:
    def play(core: Core, groups: int) -> None:
        core.deliver(core.tickets(2 * groups))
        core.label_all()

    for name, sampler in (("fifo", Fifo()), ("freshest", Freshest())):
        admission = Admission(max_lag=3, per_version=4)
        now, later = (
            Core(tmp_path / f"{name}-{each}", make_settings(admission=admission, sampler=sampler)) for each in range(2)
        )
        for core in (now, later):
            play(core, 3)
            core.planned(0)
        assert now.plan_ahead(1) is None, "one group is left, and two are needed"
        for core in (now, later):
            play(core, 1)
        ahead = now.plan_ahead(1)
        assert now.plan_ahead(1) == ahead
        now.restart()
        for core in (now, later):
            play(core, 2)
            core.publish(1)
        assert now.planned(1).ids == later.planned(1).ids
        assert (ahead is None) == (name == "freshest")
        if name == "freshest":
            assert now.plan_ahead(1) == now.planned(1), "what is recorded is certain"


def test_a_step_is_not_trained_because_a_later_plan_was_handed_out_ahead(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=3, per_version=4)))
    core.deliver(core.tickets(8))
    core.label_all()
    core.planned(0)
    assert core.plan_ahead(1) is not None
    core.skip(0)
    assert core.planned(0).skipped == "poison"


def test_a_batch_of_the_oldest_groups_stays_as_it_was_chosen_ahead_and_an_older_group_is_in_the_next(
    tmp_path: Path,
) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=3, per_version=4), sampler=Oldest()))
    tickets = core.tickets(12)
    late = tickets[:2]
    core.deliver(tickets[2:10], version=1)
    core.label_all()
    core.planned(0)
    ahead = core.plan_ahead(1)
    core.deliver(late, version=0)
    core.deliver(tickets[10:], version=1)
    core.label_all()
    assert ahead is not None
    assert core.planned(1) == ahead
    assert core.planned(2).ids[:2] == [each.id for each in late]


def test_a_member_as_long_as_allowed_is_kept() -> None:
    members = [TrajectoryRecord("g", member, tokens, 1, 0) for member, tokens in enumerate((4, 5))]
    assert Filters(max_tokens=5).reason(members) is None
    assert Filters(max_tokens=4).reason(members) == "too_long"


def test_what_a_later_plan_uses_again_stays_though_a_checkpoint_covers_its_first_plan(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=4, per_version=4, uses=2)))
    core.run_episodes(4)
    ids = core.planned(0).ids
    assert sorted(core.planned(1).ids) == sorted(ids)
    core.checkpointed(2, kept=1)
    assert [each.id for each in core.fetch(ids)] == ids


def test_the_lag_of_what_was_trained_is_that_of_its_plan_though_its_group_is_evicted_later(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=0, per_version=4, uses=2)))
    core.run_episodes(4)
    ids = core.planned(0).ids
    core.publish(1)
    assert core.status()["depth_ready"] == 0
    with core.store.transaction(write=False) as tx:
        assert [TrajectoryRecord.of(tx, name).lag for name in ids] == [0] * len(ids)


def test_plans_that_a_checkpoint_covers_and_that_were_not_reported_count_each_trajectory_once_it_is_done(
    tmp_path: Path,
) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=4, per_version=4, uses=2)))
    core.run_episodes(4)
    for step in range(2):
        core.planned(step)
    with core.store.transaction(write=False) as tx:
        # Both plans name the same four, which are trained once both are covered.
        assert [unreported(tx, steps)["trained"] for steps in (0, 1, 2)] == [0, 0, 4]
