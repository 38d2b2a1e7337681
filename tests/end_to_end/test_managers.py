"""A run whose reward is a manager written for verl, which compares the members of whole groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.writing import write_tasks
from asyncrl.observe.sinks import metrics_file
from asyncrl.replay.store.records import TrajectoryState
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.lines import read_lines
from tests.chaos.world import World
from tests.end_to_end.support import Run
from tests.helpers import make_task

pytestmark = pytest.mark.long

Start = Callable[..., Run]
GROUP, STEPS = 4, 6


def test_a_manager_of_whole_groups_trains_and_evaluates_though_its_scorer_is_killed(
    start: Start, tmp_path: Path
) -> None:
    world, held_out = World.make(tmp_path), tmp_path / "held_out.parquet"
    write_tasks(held_out, (make_task(1000 + index) for index in range(4)))
    run = start(
        "train",
        *world.overrides(1),
        "replay.filter.zero_variance=false",
        "replay.sampler.kind=fifo",
        f"learner.group_size={GROUP}",
        f"learner.steps={STEPS}",
        f"data.eval={held_out}",
        "learner.eval_every=3",
        "cluster.actors=1",
        "cluster.scorers=1",
        "cluster.learner_ranks=1",
        "scoring.manager.name=tests.data.verl.ranking_manager.RankingRewardManager",
        "scoring.manager.compute_score=tests.end_to_end.test_managers.letters",
        "scoring.manager.num_examine=1",
        "scoring.manager.val_num_examine=2",
        "scoring.manager.batch_groups=2",
        "scoring.manager.timeout_s=200",
        "scoring.manager.sources={other: null}",
    )
    run.wait_for_step(1)
    run.kill("scoring-0")
    run.finish()
    assert [line["step"] for line in run.steps()] == list(range(STEPS))
    with closing(StoredRun(run.dir / "replay")) as stored:
        counters, audit = stored.counters(), stored.audit(1)
        rewards, sizes = _by_group(stored)
    assert (counters["scoring_failures"], counters["dead"], audit["lost"], audit["trained_twice"]) == (0, 0, 0, 0)
    for name, found in rewards.items():
        # The manager saw the whole group: a reward is the share of the other members that were beaten.
        beaten = [sum(other < own for other in found.values()) for own in found.values()]
        assert sizes[name] == {len(found)}
        assert list(found.values()) == pytest.approx([each / max(1, len(found) - 1) for each in beaten])
    assert {len(found) for found in rewards.values()} == {GROUP, 1}
    log = run.logs()
    # The kill may come between two lines.
    assert 0 <= log.count("[response]") - log.count("[score]") <= 1
    assert log.count("[score]") >= STEPS // 2
    metrics = read_lines(metrics_file(run.dir, "scoring-0"))
    assert any("manager/acc_mean" in line and "manager_mean" in line for line in metrics)
    assert run.accuracies()


def _by_group(stored: StoredRun) -> tuple[dict[str, dict[str, float]], dict[str, set[float]]]:
    """The members' rewards and what the manager said of their group's size, by group."""
    rewards: dict[str, dict[str, float]] = defaultdict(dict)
    sizes: dict[str, set[float]] = defaultdict(set)
    for name, record in stored.records():
        if record.state in (TrajectoryState.TRAINED, TrajectoryState.PLANNED, TrajectoryState.EVALUATED):
            labels = stored.labels(name)
            assert labels is not None
            rewards[record.group][name] = labels.reward
            sizes[record.group].add(labels.extra["manager/group_size"])
    return rewards, sizes


def letters(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Random answers differ in their letters."""
    return sum(map(ord, solution_str)) % 1000 / 1000
