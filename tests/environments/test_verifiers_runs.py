"""Whole runs whose episodes are played in environments of the real verifiers, by programs in their Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.data.command import convert
from asyncrl.data.converters.verifiers import PROGRAM
from asyncrl.replay.stored import StoredRun
from tests.end_to_end.support import Run
from tests.environments.toys import TOY, TOYS
from tests.learner.support import write_model


@pytest.mark.parametrize("release", list(TOY))
def test_a_tiny_policy_trains_in_the_environment_and_each_episode_is_one_branch(
    release: str, python_with: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TOYS), prepend=":")
    python, tasks = str(python_with(release)), tmp_path / "tasks.parquet"
    convert("verifiers", TOY[release], tasks, python=python, arguments='{"size": 8}')
    words = (
        *("experiment=gsm8k_calculator", f"model.path={write_model(tmp_path / 'model')}", "model.dtype=float32"),
        *(f"data.train={tasks}", "actor.tools=[]", "actor.max_turn_tokens=8", "actor.max_turns=2"),
        *(f"actor.agent_command={json.dumps([python, str(PROGRAM)])}", "actor.agent_processes=2"),
        *(f"actor.agent_environment={{PYTHONPATH: {TOYS}}}", "scoring.shaping.environment_weight=1.0"),
        *("learner.batch_size=8", "learner.group_size=4", "learner.steps=2", "replay.retention=all"),
    )
    with Run("train", tmp_path, *words) as run:
        run.finish(240)
        assert [line["step"] for line in run.steps()] == [0, 1]
    stored = StoredRun(run.dir / "replay")
    plans = [stored.plan(step) for step in range(2)]
    trained = [stored.trajectory(name) for plan in plans if plan for name in plan.ids]
    stored.close()
    assert len(trained) == 2 * 8
    for each in trained:
        assert each is not None
        assert len(each.branches) == 1
        assert set(each.rewards) == {"right", "brief"}
