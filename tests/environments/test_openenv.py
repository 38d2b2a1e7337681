"""The agent `openenv` against servers of the real OpenEnv, in a Python of their own."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.agents.openenv import OpenEnvAgent
from asyncrl.data.command import convert
from asyncrl.data.reading import TaskFile
from asyncrl.machine.ports import free_ports
from asyncrl.replay.stored import StoredRun
from tests.agents.support import played, scores, shown, task_with
from tests.agents.test_openenv import call_of
from tests.end_to_end.support import Run
from tests.environments.toys import TOYS
from tests.helpers import until
from tests.learner.support import write_model

Pythons = Callable[[str], Path]


@contextmanager
def serving(python: Path, kind: str) -> Iterator[str]:
    """The address of a server of the toy environment. It may take seconds to start, for which agents wait."""
    port = free_ports(1)
    environment = {**os.environ, "PYTHONPATH": str(TOYS)}
    process = subprocess.Popen([python, "-m", "toy_openenv", kind, str(port)], env=environment)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def test_answers_are_actions_and_an_error_of_a_step_is_the_policys_to_read(python_with: Pythons) -> None:
    with serving(python_with("openenv"), "text") as url:
        agent = OpenEnvAgent(url, start_s=180.0)
        trajectory = await played(agent, task_with({"openenv": '{"seed": 9}'}), ["crash", "3", "9"])
    assert scores(trajectory) == [None, -0.25, 1.0]
    prompt, crashed, wrong = shown(trajectory)
    assert "Guess a number." in prompt
    assert "Error: the board fell from the table" in crashed
    assert "wrong" in wrong
    assert len(trajectory.branches) == 1


async def test_tools_and_fields_of_an_environment_are_the_policys(python_with: Pythons) -> None:
    python = python_with("openenv")
    with serving(python, "tools") as url:
        script = [call_of("add", number=2), call_of("add", number=3)]
        trajectory = await played(OpenEnvAgent(url, start_s=180.0), task_with({"openenv": {"seed": 5}}), script)
        assert scores(trajectory) == [0.0, 1.0]
        assert "the sum is 2" in shown(trajectory)[1]
    with serving(python, "fields") as url:
        script = [call_of("step", row=1, column=1), call_of("step", row=4, column=1)]
        trajectory = await played(OpenEnvAgent(url, start_s=180.0), task_with({"openenv": {"seed": 4}}), script)
        assert scores(trajectory) == [-0.25, 1.0]


def test_a_tiny_policy_trains_at_a_server_that_has_fewer_sessions_than_there_are_episodes(
    python_with: Pythons, tmp_path: Path
) -> None:
    with serving(python_with("openenv"), "tasks") as url:
        until(lambda: _answers(url), seconds=120)
        convert("openenv", url, tmp_path / "tasks.parquet", prompt="Play.")
        tasks = list(TaskFile(tmp_path / "tasks.parquet"))
        assert [json.loads(task.extra_info["openenv"])["index"] for task in tasks] == [0, 1, 2]
        words = (
            *("experiment=gsm8k_calculator", f"model.path={write_model(tmp_path / 'model')}", "model.dtype=float32"),
            *(f"data.train={tmp_path / 'tasks.parquet'}", "actor.tools=[]", "actor.max_turn_tokens=8"),
            *("actor.agent=openenv", f"actor.agent_options={{url: '{url}', sessions: 8}}", "actor.max_turns=2"),
            *("scoring.rule=environment", "learner.batch_size=8", "learner.group_size=4", "learner.steps=2"),
            *("replay.retention=all", "learner.eval_every=0"),
        )
        with Run("train", tmp_path, *words) as run:
            run.finish(240)
            assert [line["step"] for line in run.steps()] == [0, 1]
    stored = StoredRun(run.dir / "replay")
    trained = [stored.trajectory(name) for step in range(2) if (plan := stored.plan(step)) for name in plan.ids]
    stored.close()
    assert len(trained) == 2 * 8
    for each in trained:
        assert each is not None
        assert len(each.branches) == 1


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
