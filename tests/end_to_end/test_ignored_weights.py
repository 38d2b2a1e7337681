"""An evaluation whose server ignores the weights that it is sent scores nothing: it ends, and says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.exits import EXIT_FAILURE
from tests.chaos.world import World
from tests.end_to_end.support import ROOT
from tests.helpers import GENEROUS_S

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_an_evaluation_ends_with_the_canary_that_its_server_does_not_repeat(tmp_path: Path) -> None:
    world, fake = World.make(tmp_path), Path(__file__).parent / "fake_server"
    left_out = ("engine.", "cluster.", "model.path", "data.train")
    words = [
        *(each for each in world.overrides(1) if not each.startswith(left_out)),
        *("engine.kind=sglang", f"engine.python={sys.executable}", "engine.server.arguments=['--device=cpu']"),
        *(f"engine.server.environment={{PYTHONPATH: '{fake}:{ROOT}'}}", f"run.dir={tmp_path}"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "evaluate", world.model, "--data", world.tasks, "--n", "2", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * GENEROUS_S,
    )
    assert done.returncode == EXIT_FAILURE, done.stderr
    assert "version 0, received by zmq, fails its canary in http" in done.stderr
    assert "differ from the learner's" in done.stderr
    assert "no other version follows" in done.stderr
    assert not list(tmp_path.rglob("evaluation.json"))
