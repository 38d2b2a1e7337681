"""A whole run whose policy has tools written for verl."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.compat.verl.names import provide_verl
from tests.chaos.world import BATCH, World
from tests.end_to_end.support import Run

pytestmark = pytest.mark.skipif(not provide_verl(), reason="verl itself is installed here")


@pytest.mark.heavy
def test_a_run_trains_with_tools_of_verl_and_ends_their_episodes(tmp_path: Path) -> None:
    world, notes = World.make(tmp_path), tmp_path / "notes"
    tool = f"{{class_name: tests.data.verl.noting_tool.NotingTool, config: {{file: {notes}}}}}"
    functions = Path(__file__).parents[3] / "data/verl/function_tools.py"
    words = [f"actor.verl_tools=[{tool}, {{function_tool_path: {functions}}}]", "actor.max_turns=2"]
    words += ["actor.max_tokens=400", "engine.max_length=400", "learner.steps=3"]
    with Run("train", tmp_path, *world.overrides(1), *words) as run:
        run.finish()
        steps = [row["step"] for row in run.steps()]
    assert steps == [0, 1, 2]
    noted = [line.split() for line in notes.read_text().splitlines()]
    begun, ended = (sorted(name for word, name in noted if word == wanted) for wanted in ("begins", "ends"))
    assert len(begun) >= 3 * BATCH
    assert begun == ended
