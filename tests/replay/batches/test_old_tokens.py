"""Masked tokens: what a plan records of them, and what is counted."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console, RenderableType

from asyncrl.replay.batches import cohorts
from asyncrl.replay.batches.sampling import Oldest
from asyncrl.replay.client.shards import join_plans
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from asyncrl.replay.store.records import TrajectoryRecord
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.inspect.episode import readable
from asyncrl.runs.inspect.episodes import list_episodes, step_row
from asyncrl.runs.inspect.table import step_view
from asyncrl.runs.state.status import summarise
from asyncrl.types import BatchPlan, Ticket
from tests.helpers import make_demonstration, make_task, make_trajectory
from tests.replay.support import Core, make_settings

BATCH = 4


def masking(folder: Path, max_lag: int = 1, masks_old: bool = True, **changes: Any) -> Core:
    return Core(folder, settings(max_lag, masks_old=masks_old, **changes))


def settings(max_lag: int, **changes: Any) -> Any:
    return make_settings(admission=Admission(max_lag, BATCH), sampler=Oldest(), reissue_evicted=False, **changes)


def put(core: Core, ticket: Ticket, *versions: int) -> None:
    """Deliver an episode whose tokens these versions sampled."""
    count = len(versions)
    core.put(make_trajectory(ticket, versions=np.array([*[-1] * count, *versions], np.int32), length=2 * count))


def at_version_2(core: Core) -> list[Ticket]:
    """Train steps 0 and 1 with other groups. Returns the tickets of two groups of version 0 that still run."""
    old = core.tickets(4)
    for step in range(2):
        holding = [each.id for each in old]
        for ticket in core.tickets(4, holding=holding):
            put(core, ticket, step)
        core.label_all()
        assert core.plan(step) is not None
        core.publish(step + 1)
    return old


def deliver_old(core: Core, old: list[Ticket]) -> None:
    """One member has two old tokens of three, one has only old ones, and two are young."""
    put(core, old[0], 0, 0, 2)
    put(core, old[1], 0, 0)
    put(core, old[2], 1, 2)
    put(core, old[3], 2)
    core.label_all()


def test_a_group_with_old_tokens_is_trained_without_them(tmp_path: Path) -> None:
    core = masking(tmp_path)
    deliver_old(core, at_version_2(core))
    plan = core.planned(2)
    trained = dict(zip(plan.ids, plan.trained_tokens, strict=True))
    assert sorted(trained.values()) == [0, 1, 1, 2]
    assert set(plan.first_trained) == {1}
    assert list(plan.sampled) != list(plan.trained_tokens)
    status = core.status()
    assert (status["evicted"], status["tokens_masked"], status["tokens_thrown_away"]) == (0, 4, 4)
    assert core.audit()["largest_lag"] == 1


def test_without_masks_the_group_is_thrown_away(tmp_path: Path) -> None:
    core = masking(tmp_path, masks_old=False)
    deliver_old(core, at_version_2(core))
    assert core.plan(2) is None
    assert core.status()["evicted"] == 2
    assert core.status()["tokens_masked"] == 0


def test_a_group_without_a_young_token_is_thrown_away(tmp_path: Path) -> None:
    core = masking(tmp_path)
    old = at_version_2(core)
    for ticket in old:
        put(core, ticket, 0, 0)
    core.label_all()
    assert core.plan(2) is None
    assert core.status()["evicted"] == 4


def test_a_greedy_member_which_is_not_trained_keeps_no_group(tmp_path: Path) -> None:
    core = masking(tmp_path, greedy_sibling=True)
    for ticket in at_version_2(core):
        put(core, ticket, 0, 0, 0 if ticket.member else 2)
    core.label_all()
    assert core.plan(2) is None
    assert core.status()["evicted"] == 4


def test_a_plan_without_old_tokens_records_nothing_of_them(tmp_path: Path) -> None:
    core = masking(tmp_path)
    for ticket in core.tickets(4):
        put(core, ticket, 0)
    core.label_all()
    plan = core.planned(0)
    assert (plan.first_trained, plan.trained) == ([], [])
    assert plan.trained_tokens == plan.sampled


@pytest.mark.parametrize(("max_lag", "masks_old"), [(0, False), (8, True), (8, False)])
def test_a_plan_keeps_its_masks_if_the_run_resumes_with_other_settings(
    max_lag: int, masks_old: bool, tmp_path: Path
) -> None:
    core = masking(tmp_path)
    deliver_old(core, at_version_2(core))
    plan = core.planned(2)
    core.restart(settings(max_lag, masks_old=masks_old))
    assert core.planned(2) == plan
    core.store.close()
    with closing(StoredRun(tmp_path)) as stored:
        assert stored.plan(2) == plan


def test_only_trained_tokens_count_as_trained(tmp_path: Path) -> None:
    core = masking(tmp_path)
    deliver_old(core, at_version_2(core))
    core.planned(2)
    core.checkpointed(3)
    status = core.status()
    assert status["tokens_trained"] == 4 + 4 + 4
    assert status["tokens_trained"] + status["tokens_masked"] == status["tokens_accepted"]


def test_a_step_that_is_skipped_throws_its_trajectories_away_once(tmp_path: Path) -> None:
    core = masking(tmp_path)
    deliver_old(core, at_version_2(core))
    core.planned(2)
    core.skip(2)
    status = core.status()
    assert (status["tokens_masked"], status["tokens_thrown_away"], status["tokens_dead"]) == (0, 0, 8)


def test_an_episode_without_a_trained_token_is_not_counted_among_the_trained(tmp_path: Path) -> None:
    core = masking(tmp_path)
    deliver_old(core, at_version_2(core))
    core.planned(2)
    with core.store.transaction(write=False) as tx:
        sums = cohorts.selection(tx).sums
    assert sums["masked"].episodes == 1
    assert sums["masked"].tokens == 2


def test_the_lag_of_a_planned_trajectory_is_that_of_its_oldest_trained_token(tmp_path: Path) -> None:
    core = masking(tmp_path)
    old = at_version_2(core)
    deliver_old(core, old)
    plan = core.planned(2)
    with core.store.transaction(write=False) as tx:
        lags = [TrajectoryRecord.of(tx, ticket.id).lag for ticket in old]
    assert lags == [0, -1, 1, 0]
    core.store.close()
    with closing(StoredRun(tmp_path)) as stored:
        assert step_row(stored, plan).lag_max == 1


def test_the_views_of_a_step_and_of_an_episode_name_the_masked_tokens(tmp_path: Path) -> None:
    core = masking(tmp_path)
    old = at_version_2(core)
    deliver_old(core, old)
    plan = core.planned(2)
    core.store.close()
    with closing(StoredRun(tmp_path)) as stored:
        step, rows = step_row(stored, plan), list_episodes(stored, step=2, sort="reward")
        episode = printed(readable(stored.record(old[0].id), str))
    assert step.masked == 4
    assert {row.id: row.masked for row in rows} == {old[0].id: 2, old[1].id: 2, old[2].id: 0, old[3].id: 0}
    shown = printed(step_view(step, {"best": [(row, None) for row in rows]}))
    assert "of which 8 sampled; 4 of these are masked, since they are too old" in shown
    assert shown.count("masked 2") == 2
    assert "of which 3 sampled, by version 0 or newer; 2 of these are masked, since they are too old" in episode


def printed(view: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(view)
    return out.getvalue()


def test_the_status_shows_the_lags_of_trained_tokens(tmp_path: Path) -> None:
    core = masking(tmp_path)
    deliver_old(core, at_version_2(core))
    core.planned(2)
    with core.store.transaction(write=False) as tx:
        assert summarise(tx).counts["planned_trajectories"] == {0: 8 + 2, 1: 1}


def test_the_oldest_groups_still_come_first(tmp_path: Path) -> None:
    core = masking(tmp_path)
    old = at_version_2(core)
    for ticket in core.tickets(8, holding=[each.id for each in old]):
        put(core, ticket, 2)
    deliver_old(core, old)
    assert set(core.planned(2).group_ids) == {each.group_id for each in old}


def test_parts_of_shards_with_and_without_masks_are_joined() -> None:
    masked = BatchPlan(3, 3, ["a", "b"], ["g", "g"], [9, 9], [5, 5], [1.0] * 2, first_trained=[2, 2], trained=[0, 3])
    whole = BatchPlan(3, 3, ["c", "d"], ["h", "h"], [9, 9], [4, 4], [1.0] * 2)
    joined = join_plans([masked, whole])
    assert (joined.first_trained, joined.trained) == ([2, 2, 0, 0], [0, 3, 4, 4])
    assert join_plans([whole]).trained == []


def test_a_demonstration_is_never_too_old(tmp_path: Path) -> None:
    shown = [{"role": "assistant", "content": "1"}]
    tasks = [make_task(index, demonstration=shown) for index in range(5)]
    core = masking(tmp_path, feed=Feed(tasks, seed=0, shuffle=True))
    held: list[Ticket] = []
    for step in range(3):
        for ticket in core.tickets(100, holding=[each.id for each in held]):
            if ticket.task.demonstration:
                core.put(make_demonstration(ticket))
            elif step == 0 and len(held) < 4:
                held.append(ticket)
            else:
                put(core, ticket, step)
        if step == 2:
            for ticket in held:
                put(core, ticket, 0, 2)
        core.label_all()
        plan = core.planned(step)
        core.publish(step + 1)
    assert {plan.trained_tokens[index] for index in plan.demonstrations} == {4}
    played = set(range(len(plan.ids))) - set(plan.demonstrations)
    assert {plan.trained_tokens[index] for index in played} == {1}
