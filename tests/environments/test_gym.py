"""Games of the real textarena and gem, each package in a Python of its own, over the real endpoint."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.agents.chat_api.program import AgentPrograms
from asyncrl.data.command import convert
from asyncrl.data.converters.gym import PROGRAM
from asyncrl.data.reading import TaskFile
from asyncrl.errors import DataError
from asyncrl.replay.stored import StoredRun
from asyncrl.types import Task
from tests.agents.support import played, scores, shown
from tests.end_to_end.support import Run
from tests.environments.toys import TOYS
from tests.learner.support import write_model

Pythons = Callable[[str], Path]

NUMBERS = range(1, 21)
GAMES = {"textarena": "textarena:GuessTheNumber-v0", "gem": "gem:game:GuessTheNumber-v0-easy"}
"""Two games that say whether a number, in brackets or in a box, is too high."""


@pytest.fixture(autouse=True)
def opponents_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TOYS), prepend=":")


def written(python: Path, folder: Path, game: str, **more: Any) -> list[Task]:
    convert("gym", game, folder / "tasks.parquet", python=str(python), **more)
    return list(TaskFile(folder / "tasks.parquet"))


@asynccontextmanager
async def program(python: Path) -> AsyncIterator[AgentPrograms]:
    programs = AgentPrograms([str(python), str(PROGRAM)], {"PYTHONPATH": str(TOYS)}, processes=1)
    try:
        yield programs
    finally:
        await programs.close()


async def test_a_game_of_textarena_gives_its_reward_at_its_end(python_with: Pythons, tmp_path: Path) -> None:
    python = python_with("textarena")
    tasks = written(python, tmp_path, GAMES["textarena"], limit=2)
    guesses = [f"I say [{number}]." for number in NUMBERS[:10]]
    metrics: dict[str, float] = {}
    async with program(python) as programs:

        async def agent(*given: Any) -> Any:
            result = await programs(*given)
            metrics.update(result.metrics)
            return result

        trajectory = await played(agent, tasks[1], ["I do not know.", *guesses[:5]])
    assert "You are playing Guess The Number" in tasks[1].messages[0]["content"]
    assert len(trajectory.branches) == 1
    assert set(trajectory.rewards) == {"reward"}
    assert set(scores(trajectory)) == {None}
    texts = shown(trajectory)
    assert "invalid move" in texts[1]
    assert sum("You are playing" in text for text in texts) == 1, "the history is not repeated"
    assert not any("I say" in text for text in texts), "nor is what the policy said"
    assert metrics["other_prompt"] == 0.0


async def test_the_steps_of_a_game_of_gem_have_their_rewards(python_with: Pythons, tmp_path: Path) -> None:
    python = python_with("gem")
    [task] = written(python, tmp_path, GAMES["gem"], limit=1)
    async with program(python) as programs:
        trajectory = await played(programs, task, [rf"\boxed{{{number}}}" for number in (1, 10, 2, 3)])
    assert len(trajectory.branches) == 1
    assert trajectory.rewards == {}
    assert all(score is not None for score in scores(trajectory))
    assert "Enter your next guess." in shown(trajectory)[1]


async def test_an_opponent_plays_the_other_players_of_a_game_of_textarena(python_with: Pythons, tmp_path: Path) -> None:
    python = python_with("textarena")
    async with program(python) as programs:
        for opponent, answers in (("first_free", ["[8]", "[7]", "[3]"]), ("FirstFree", ["[1]", "[4]", "[7]"])):
            args = {"players": 2, "player": 1, "opponent": f"toy_opponent:{opponent}"}
            [task] = written(python, tmp_path, "textarena:TicTacToe-v0", limit=1, arguments=json.dumps(args))
            trajectory = await played(programs, task, answers)
            won = opponent == "FirstFree"
            assert trajectory.rewards == {"reward": 1.0 if won else -1.0}
            assert "[Player 0] [0]" in shown(trajectory)[0]


@pytest.mark.parametrize(
    ("game", "arguments", "reason"),
    [
        ("textarena:Nothing-v0", "{}", "Nothing-v0 not found"),
        ("textarena:TicTacToe-v0", "{}", "does not begin with 1 players"),
        ("textarena:TicTacToe-v0", '{"players": 2}', "give the other players an opponent"),
        ("textarena:TicTacToe-v0", '{"players": 2, "opponent": "toy_opponent:nobody"}', "cannot be imported"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(
    game: str, arguments: str, reason: str, python_with: Pythons, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=reason):
        written(python_with("textarena"), tmp_path, game, arguments=arguments, limit=1)


def test_a_tiny_policy_trains_in_games_and_each_episode_is_one_branch(python_with: Pythons, tmp_path: Path) -> None:
    python = python_with("textarena")
    written(python, tmp_path, GAMES["textarena"], limit=8)
    words = (
        *("experiment=gsm8k_calculator", f"model.path={write_model(tmp_path / 'model')}", "model.dtype=float32"),
        *(f"data.train={tmp_path / 'tasks.parquet'}", "actor.tools=[]", "actor.max_turn_tokens=8", "actor.max_turns=2"),
        *(f"actor.agent_command={json.dumps([str(python), str(PROGRAM)])}", "actor.agent_processes=2"),
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
    assert all(each is not None and len(each.branches) == 1 for each in trained)
