"""The program `gym_agent` with games of ours, over the real endpoint. The real textarena and gem are in
tests/environments."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.agents.chat_api.program import AgentPrograms
from asyncrl.agents.chat_api.result import AgentError
from asyncrl.data.command import convert, main
from asyncrl.data.converters.gym import PROGRAM
from asyncrl.data.reading import TaskFile
from asyncrl.errors import DataError
from asyncrl.types import Task
from tests.agents.chat_api.support import LIMITS
from tests.agents.support import played, scores, shown
from tests.helpers import GENEROUS_S

pytestmark = pytest.mark.slow

HERE = str(Path(__file__).parent)
GUESS = "toy_games:Guess"


def written(folder: Path, name: str = GUESS, **more: Any) -> list[Task]:
    convert("gym", name, folder / "tasks.parquet", python=sys.executable, **more)
    return list(TaskFile(folder / "tasks.parquet"))


@asynccontextmanager
async def program() -> AsyncIterator[AgentPrograms]:
    programs = AgentPrograms([sys.executable, str(PROGRAM)], {"PYTHONPATH": HERE}, processes=1)
    try:
        yield programs
    finally:
        await programs.close()


@pytest.fixture(autouse=True)
def games_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE, prepend=":")


def hint(task: Task) -> str:
    found = re.search(r"hint: (\d)", task.messages[-1]["content"])
    assert found
    return found[1]


async def test_seeds_are_tasks_and_answers_are_actions_whose_rewards_turns_have(tmp_path: Path):
    tasks = written(tmp_path, limit=5, first=3, arguments='{"largest": 8}')
    assert [task.id for task in tasks] == [f"gym/{GUESS}/seed/{seed}" for seed in range(3, 8)]
    assert len({hint(task) for task in tasks}) > 1
    async with program() as programs:
        for task in tasks[:2]:
            trajectory = await played(programs, task, ["0", hint(task), "never"])
            assert scores(trajectory) == [-0.25, 1.0]
            assert trajectory.rewards == {}
            assert len(trajectory.branches) == 1
            prompt, wrong = shown(trajectory)
            assert task.messages[-1]["content"] in prompt, "the same seed gives the same game, in another process"
            assert "wrong\nYour guess?" in wrong
        assert programs.counts.started == 1


async def test_limits_end_an_episode_as_it_is_and_a_cut_answer_is_no_action(tmp_path: Path):
    [task] = written(tmp_path, limit=1)
    async with program() as programs:
        trajectory = await played(programs, task, ["0", "0", "0"], replace(LIMITS, max_turns=2))
        assert scores(trajectory) == [-0.25, -0.25]
        trajectory = await played(programs, task, ["0 " * 400], replace(LIMITS, max_turn_tokens=20))
    assert scores(trajectory) == [None]
    assert trajectory.rewards == {"reward": 0.0}


async def test_a_game_that_breaks_fails_its_episode_alone(tmp_path: Path):
    [task] = written(tmp_path, limit=1, arguments='{"breaks_at": "0", "asks_at": "-"}')
    async with program() as programs:
        with pytest.raises(AgentError, match="the board fell from the table"):
            await played(programs, task, ["0"])
        async with asyncio.timeout(GENEROUS_S):
            with pytest.raises(AgentError, match="EOFError"):
                await played(programs, task, ["-"])
        assert scores(await played(programs, task, [hint(task)])) == [1.0]
        for extra_info in ({}, {"gym": "{"}):
            with pytest.raises(AgentError, match=r"extra_info\.gym is missing"):
                await played(programs, replace(task, extra_info=extra_info), [])
        assert programs.counts.started == 1


async def test_a_game_that_its_seed_does_not_make_is_counted(tmp_path: Path):
    [task] = written(tmp_path, limit=1, arguments='{"largest": 100000000, "seeded": false}')
    metrics: dict[str, float] = {}

    async with program() as programs:

        async def agent(*given: Any) -> Any:
            result = await programs(*given)
            metrics.update(result.metrics)
            return result

        await played(agent, task, ["0"], replace(LIMITS, max_turns=1))
    assert metrics == {"unfinished": 1.0, "other_prompt": 1.0}


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("toy_games:Chess", "{}", "toy_games:Chess cannot be imported"),
        ("nowhere:Chess", "{}", "No module named 'nowhere'"),
        (GUESS, '{"smallest": 3}', "cannot be made: TypeError.*smallest"),
        (GUESS, "[3]", "must be a JSON object"),
        ("toy_games:silent_game", "{}", "games of texts can be played"),
        ("gem:game:GuessTheNumber-v0-easy", "{}", "gem is not installed in the Python"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_when_its_tasks_are_written(
    name: str, arguments: str, reason: str, tmp_path: Path
):
    with pytest.raises(DataError, match=reason):
        written(tmp_path, name, arguments=arguments, limit=1)
    assert not (tmp_path / "tasks.parquet").exists()


def test_a_task_has_what_makes_its_game(tmp_path: Path):
    [task] = written(tmp_path, limit=1, arguments='{"largest": 3}')
    assert json.loads(task.extra_info["gym"]) == {"game": GUESS, "args": {"largest": 3}, "seed": 0}


def test_the_command_says_where_the_programs_of_a_run_find_the_game(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--source", GUESS, "--python", sys.executable, "--limit", "1", "--out", str(tmp_path / "tasks.parquet")]
    main(["gym", *words])
    value = json.dumps({"PYTHONPATH": os.environ["PYTHONPATH"]})
    assert f"actor.agent_environment='{value}'" in capsys.readouterr().out
