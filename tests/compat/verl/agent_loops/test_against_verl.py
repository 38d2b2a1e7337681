"""Our agent loops and those of verl play the same episodes, where ASYNCRL_VERL_PYTHON names a Python that has verl."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.compat.verl.agent_loops import program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "ASYNCRL_VERL_PYTHON" not in os.environ, reason="needs verl: set ASYNCRL_VERL_PYTHON to a Python that has it"
    ),
]
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def of_verl() -> dict[str, Any]:
    """The trajectories of verl's own loops, which a process of its own plays."""
    command = [os.environ["ASYNCRL_VERL_PYTHON"], "-m", program.__name__]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def test_loops_of_verl_and_our_own_play_the_same_episodes(of_verl: dict[str, Any]) -> None:
    ours = json.loads(json.dumps(await program.trajectories()))
    assert list(of_verl) == list(ours)
    for name, trajectory in ours.items():
        assert of_verl[name] == trajectory, name
