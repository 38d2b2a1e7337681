"""A run with reward functions of TRL, on rows with a plain text and columns of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.replay.stored import StoredRun
from tests.chaos.world import TASKS, World
from tests.end_to_end.support import Run

pytestmark = pytest.mark.long

STEPS = 3


def test_the_reward_is_the_weighted_sum_without_functions_that_do_not_apply(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    rows = tmp_path / "sums.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{n}+1", "answer": str(n + 1), "level": n}) + "\n" for n in range(TASKS))
    )
    weights = {"letters": 1.0, "of_even_rows": 0.25}
    entries = ", ".join(
        f"{{name: tests.end_to_end.trl_rewards.{name}, weight: {each}}}" for name, each in weights.items()
    )
    run = start(
        "train",
        *World.make(tmp_path).overrides(1),
        "replay.filter.zero_variance=false",
        "cluster.actors=1",
        "cluster.scorers=1",
        "cluster.learner_ranks=1",
        f"learner.steps={STEPS}",
        f"data.train={rows}",
        f"scoring.rule=[{entries}]",
    )
    run.finish()
    with closing(StoredRun(run.dir / "replay")) as stored:
        plans = [plan for step in range(STEPS) if (plan := stored.plan(step)) is not None]
        labels = [found for plan in plans for name in plan.ids if (found := stored.labels(name)) is not None]
        assert stored.counters()["scoring_failures"] == 0
    assert len(labels) == STEPS * 8
    even = [each for each in labels if "rule/of_even_rows" in each.extra]
    assert 0 < len(even) < len(labels)
    for each in labels:
        bonus = 0.25 * 2.0 if each in even else 0.0
        assert each.reward == pytest.approx(each.extra["rule/letters"] + bonus)
