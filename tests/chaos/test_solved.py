"""A real learner is killed at each moment of the end of a run whose policy solves its tasks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.config.locations import SOLVED_FILE
from asyncrl.ids import shard_of
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.run import Run as StoredFolder
from tests.chaos.mortal_learner import FOLDER_VARIABLE, MOMENTS
from tests.chaos.rule import SHARDS
from tests.chaos.verdict import judge
from tests.chaos.world import World
from tests.end_to_end.support import Run

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

GO_ON_S = 1200.0
"""The learner starts five times, which takes minutes on a busy machine."""
OVERRIDES = (
    "scoring.rule=tests.chaos.rule.solved",
    "scoring.timeout_s=60",
    "algorithm.reward=[{name: tests.chaos.mortal_learner.Unchanged}]",
    "replay.filter.max_refused=8",
    "cluster.actors=1",
    "cluster.scorers=1",
    "cluster.learner_ranks=1",
)


def test_a_learner_that_is_killed_while_the_run_is_solved_ends_as_solved_and_trains_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    for moment in MOMENTS:
        (deaths / moment).touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(deaths))
    overrides = [*World.make(tmp_path).overrides(SHARDS), *OVERRIDES]
    with Run("train", tmp_path, *overrides, "learner.steps=1000000") as run:
        run.finish(GO_ON_S)
        output = run.output
    assert not list(deaths.iterdir()), "the learner has died at each moment"
    assert output.count("learner was killed by SIGKILL") == len(MOMENTS)
    folder = StoredFolder(run.dir)
    assert folder.end() == "solved"
    assert "the policy solves these tasks" in (run.dir / SOLVED_FILE).read_text()

    with closing(StoredRun(run.dir / "replay")) as stored:
        steps = stored.steps()
        plans = [plan.ids for step in range(steps) if (plan := stored.plan(step)) is not None]
    assert [1] in [sorted({shard_of(name, SHARDS) for name in ids}) for ids in plans], "a step of one shard"
    again = tmp_path / "again"
    again.mkdir()
    source = [f"replay.source={run.dir / 'replay'}", f"learner.steps={steps}", "learner.checkpoint_every=1000000"]
    with Run("learner", again, *overrides, *source) as uninterrupted:
        uninterrupted.finish()
    verdict = judge(run, uninterrupted.dir, (), ())
    assert verdict["broken"] == []
    assert verdict["trained"] == sum(map(len, plans)) > 0
