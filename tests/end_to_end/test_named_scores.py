"""A run whose algorithm reads a number that the reward function gives for some episodes only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.replay.stored import StoredRun
from tests.chaos.world import World
from tests.end_to_end.support import Run

pytestmark = pytest.mark.long

STEPS = 4


def test_episodes_without_the_number_are_dead_letters_with_the_reason_and_the_run_goes_on(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(
        "train",
        *World.make(tmp_path).overrides(1),
        "replay.filter.zero_variance=false",
        "replay.oversample=1",
        "replay.max_attempts=2",
        f"learner.steps={STEPS}",
        "cluster.actors=1",
        "cluster.scorers=1",
        "cluster.learner_ranks=1",
        "scoring.rule=tests.end_to_end.rules.uneven",
        "algorithm.advantage.name=gdpo",
        "algorithm.advantage.params={weights: {rule/uneven: 1.0, rule/uneven/style: 0.5}}",
    )
    run.finish()
    assert [line["step"] for line in run.steps()] == list(range(STEPS))
    with closing(StoredRun(run.dir / "replay")) as stored:
        counters, audit, dead = stored.counters(), stored.audit(1), dict(stored.dead_letters())
        trained = [stored.labels(name) for step in range(STEPS) for name in _ids(stored, step)]
    assert (audit["lost"], audit["trained_twice"], counters["plans_skipped"]) == (0, 0, 0)
    assert all(labels is not None and "rule/uneven/style" in labels.extra for labels in trained)
    assert counters["dead"] == len(dead) > 0
    assert counters["scoring_failures"] >= 2 * len(dead)
    assert {name.partition(".")[2] for name in dead} == {"0.0"}
    assert all("reads the scores ['rule/uneven/style']" in each.reason for each in dead.values())
    assert "Traceback" not in (run.dir / "logs" / "learner.log").read_text()


def _ids(stored: StoredRun, step: int) -> list[str]:
    plan = stored.plan(step)
    assert plan is not None
    return list(plan.ids)
