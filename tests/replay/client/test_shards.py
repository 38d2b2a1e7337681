"""Shards: one batch out of several replays over real sockets, and one that is away holds up its part only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.changes import values_of
from asyncrl.config.schema import DataConfig, LearnerConfig, TrainConfig
from asyncrl.errors import ConfigError, TasksSolvedError
from asyncrl.ids import shard_of
from asyncrl.replay.batches.sampling import Filters
from asyncrl.replay.client.client import ReplayClient
from asyncrl.replay.client.shards import ShardedReplay, join_evaluations, join_plans
from asyncrl.replay.failures.filter_limit import FEWEST
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from asyncrl.replay.stored import StoredRun
from asyncrl.types import BatchPlan, LabelNeeds
from tests.helpers import make_labels, make_played, make_task, make_trajectory
from tests.replay.support import ReplayThread, make_settings

DATA = DataConfig(["train.parquet"])
SHARDS = 2
TASKS = [make_task(index) for index in range(8)]


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[list[ReplayThread]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ReplayThread(tmp_path / str(shard), settings(shard))) for shard in range(SHARDS)]


def settings(shard: int) -> ReplaySettings:
    feed = Feed(TASKS, 0, True, shard=shard, shards=SHARDS)
    return make_settings(feed=feed, admission=Admission(max_lag=1, per_version=4), shard=shard, shards=SHARDS)


def clients(shards: list[ReplayThread], worker: str) -> list[ReplayClient]:
    return [each.client(worker) for each in shards]


def work(client: ReplayClient, count: int, **scores: float) -> list[str]:
    tickets = client.tickets([], count)
    client.put_all([make_trajectory(ticket) for ticket in tickets])
    leases = client.lease(["rules"], 100, 1 << 20)
    assert not any(client.label([replace(make_labels(lease.trajectory.id), extra=scores) for lease in leases]))
    return [ticket.id for ticket in tickets]


@pytest.mark.slow
def test_a_batch_has_a_part_of_every_shard_and_every_rank_fetches_it_from_all(
    shards: list[ReplayThread], tmp_path: Path
) -> None:
    actors = clients(shards, "a")
    done = [work(client, 4) for client in actors]
    with closing(ShardedReplay(clients(shards, "learner"))) as replay:
        assert replay.configure(values_of(TrainConfig(data=DATA)), 1) == []
        plan = replay.plan(0)
        assert plan is not None
        assert [shard_of(name, SHARDS) for name in plan.ids] == [0] * 4 + [1] * 4
        assert sorted(plan.ids) == sorted(name for ids in done for name in ids)
        mixed = list(plan.ids[::2]) + list(plan.ids[1::2])
        assert [each.id for each in replay.fetch(mixed)] == mixed
        assert [each.trajectory_id for each in replay.labels(mixed)] == mixed
        with pytest.raises(ConfigError, match=r"learner\.group_size=2: it was 8"):
            replay.configure(values_of(TrainConfig(data=DATA, learner=LearnerConfig(group_size=2))), 2)
        (change,) = replay.configure(values_of(TrainConfig(data=DATA, learner=LearnerConfig(lr=0.5))), 2)
        assert (change.step, change.key, change.new, change.time) == (1, "learner.lr", 0.5, 2)
        replay.published(1)
        replay.checkpointed(1, 1)
    for client in actors:
        assert client.status()["trained"] == 4
    for shard in shards:
        shard.kill()
    with closing(StoredRun(tmp_path)) as stored:
        assert (stored.counters()["trained"], stored.audit(1)["lost"]) == (8, 0)
        assert stored.plan(0) == plan


@pytest.mark.slow
def test_a_shard_that_is_away_stops_nobody_on_the_others_and_its_part_comes_when_it_is_back(
    shards: list[ReplayThread], tmp_path: Path
) -> None:
    actors = clients(shards, "a")
    lost = shards[1]
    work(actors[1], 4)
    lost.kill()
    assert len(work(actors[0], 4)) == 4
    with closing(ShardedReplay(clients(shards, "learner"))) as replay:
        lost.start()
        plan = None
        while plan is None:
            plan = replay.plan(0)
        assert len(plan.ids) == 8


@pytest.mark.slow
def test_a_step_that_only_some_shards_have_planned_is_trained_with_the_changed_algorithm(
    shards: list[ReplayThread],
) -> None:
    """Shard 1 drops its labels of the old rule, so shard 0, which is ahead, must give up its plan of them."""
    old, new = LabelNeeds(("f",)), LabelNeeds(("g",))
    actors = clients(shards, "a")
    with closing(ShardedReplay(clients(shards, "learner"))) as replay:
        assert replay.configure(values_of(TrainConfig(data=DATA)), 1) == []
        replay.require({0: old})
        for actor in actors:
            work(actor, 4, f=1.0)
        assert replay.plan(0) is not None
        work(actors[0], 4, f=1.0)
        work(actors[1], 2, f=1.0)
        assert replay.plan(1) is None
        assert [actor.status()["depth_plans"] for actor in actors] == [2, 1]
        changed = TrainConfig(data=DATA, learner=LearnerConfig(lr=0.5))
        (change,) = replay.configure(values_of(changed), 2)
        assert change.step == 1
        replay.require({0: old, change.step: new})
        assert [actor.status()["depth_plans"] for actor in actors] == [1, 1]
        for actor in actors:
            work(actor, 4, g=1.0)
        for step, needs in enumerate((old, new)):
            plan = replay.plan(step)
            assert plan is not None
            assert [needs.unmet(labels) for labels in replay.labels(plan.ids)] == [""] * 8


def play(client: ReplayClient, *outcomes: float) -> None:
    client.put_all([make_played(ticket) for ticket in client.tickets([], 4)])
    leases = client.lease(["rules"], 4, 1 << 20)
    assert not any(
        client.label([make_labels(each.trajectory.id, outcomes[index % 2]) for index, each in enumerate(leases)])
    )


@pytest.mark.slow
def test_a_run_is_solved_only_once_the_tasks_of_all_shards_are(tmp_path: Path) -> None:
    with ExitStack() as stack:
        filters = Filters(zero_variance=True)
        filtered = [replace(settings(shard), filters=filters, max_refused_groups=FEWEST) for shard in range(SHARDS)]
        replays = [stack.enter_context(ReplayThread(tmp_path / str(each.shard), each)) for each in filtered]
        actors = clients(replays, "a")
        learner = stack.enter_context(closing(ShardedReplay(clients(replays, "learner"))))

        for actor in actors:
            play(actor, 0.0, 1.0)
        plan = learner.plan(0)
        assert plan is not None
        assert len(plan.ids) == 8
        learner.published(1)
        for _ in range(FEWEST):
            play(actors[0], 1.0, 1.0)
        assert learner.plan(1) is None, "shard 1 has work"
        play(actors[1], 0.0, 1.0)
        plan = learner.plan(1)
        assert plan is not None
        assert [shard_of(name, SHARDS) for name in plan.ids] == [1] * 4
        with closing(ShardedReplay(clients(replays, "rank"))) as other:
            assert other.plan(1) == plan
        learner.published(2)
        learner.checkpointed(2, 2)
        for _ in range(FEWEST):
            play(actors[1], 1.0, 1.0)
        with pytest.raises(TasksSolvedError, match="the policy solves these tasks"):
            learner.plan(2)
        assert [each.client("x").audit()["lost"] for each in replays] == [0, 0]


def test_evaluations_of_shards_weigh_by_their_counts() -> None:
    names = ("accuracy", "reward", "count", "failed", "tokens", "newer_tokens", "newest_version", "outcome")
    nan = float("nan")
    rows = [(1.0, 2.0, 3, 0, 9, 2, 5, 0.8), (0.0, -2.0, 1, 2, 4, 0, 3, 0.4), (nan, nan, 0, 1, 0, 0, -1, nan)]
    parts = [{**dict(zip(names, row, strict=True)), "sources": {}, "sample": [f"{row[4]}"]} for row in rows]
    assert tuple(join_evaluations(parts)[name] for name in names) == (0.75, 1.0, 4, 3, 13, 2, 5, pytest.approx(0.7))
    assert join_evaluations(parts)["sample"] == ["9", "4", "0"]


def part(names: Sequence[str], **changes: Any) -> BatchPlan:
    count = len(names)
    plan = BatchPlan(0, 0, list(names), ["g"] * count, [2] * count, [1] * count, [1.0] * count)
    return replace(plan, **changes)


def test_demonstrations_have_their_places_in_the_whole_batch() -> None:
    plan = join_plans([part(["a", "b"], demonstrations=[1]), part(["c", "d", "e"], demonstrations=[0, 2])])
    assert [plan.ids[index] for index in plan.demonstrations] == ["b", "c", "e"]


def test_a_batch_of_which_any_part_was_skipped_is_skipped() -> None:
    assert join_plans([part(["a"]), part(["b"], skipped="poison")]).skipped == "poison"
    assert join_plans([part(["a"]), part(["b"])]).skipped == ""
