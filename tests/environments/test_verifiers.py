"""Environments of the real verifiers, each version in a Python of its own, over the real endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from asyncrl.agents import AgentResult
from asyncrl.agents.chat_api.agent import AgentPlayer
from asyncrl.agents.chat_api.result import AgentError
from asyncrl.chat.chat import Chat
from asyncrl.data.command import convert
from asyncrl.data.converters.verifiers import PROGRAM
from asyncrl.data.reading import TaskFile
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.errors import DataError
from asyncrl.types import Role, Task, Trajectory
from tests.environments.toys import TOY, TOYS
from tests.episode.fakes import CHATML, ScriptedEngine, assert_trains_what_was_sampled, make_ticket, make_tokenizer

ADD = {"verifiers-0.3": "add", "verifiers-0.4": "adder_add"}
TOKENIZER = make_tokenizer(CHATML)
LIMITS = EpisodeLimits(max_turns=8, max_turn_tokens=400, max_tokens=4000, max_total_tokens=40_000)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TOYS)}

Pythons = Callable[[str], Path]


@cache
def task_of(python: Path, name: str) -> Mapping[str, Any]:
    """The environment's first task, as a row."""
    command = [python, PROGRAM, "tasks", name, "--limit", "1"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def with_arguments(row: Mapping[str, Any], **arguments: Any) -> Mapping[str, Any]:
    extra = row["extra_info"]
    changed = {**json.loads(extra["verifiers"]), "args": arguments}
    return {**row, "extra_info": {**extra, "verifiers": json.dumps(changed)}}


def as_task(row: Mapping[str, Any]) -> Task:
    source = row["data_source"]
    return Task(source, row["prompt"], row["reward_model"]["ground_truth"], source, extra_info=row["extra_info"])


class Program:
    """The program, which plays one episode after another. It takes seconds to start, so tests share it."""

    def __init__(self, python: Path) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([python, PROGRAM], stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT)
        self.python = python

    async def __call__(self, task: Task, base_url: str, api_key: str) -> AgentResult:
        asked = {"task": {"extra_info": dict(task.extra_info)}, "base_url": base_url, "api_key": api_key}
        outcome = json.loads(await asyncio.to_thread(self._say, json.dumps(asked)))
        if "error" in outcome:
            raise RuntimeError(outcome["error"])
        return AgentResult(outcome["rewards"], outcome["metrics"])

    def _say(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


@pytest.fixture(scope="module", params=list(TOY))
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def program(release: str, python_with: Pythons) -> Iterator[Program]:
    program = Program(python_with(release))
    yield program
    program.process.kill()
    program.process.wait()


only_0_4 = pytest.mark.parametrize("release", ["verifiers-0.4"], indirect=True, scope="module")


async def played(
    program: Program, row: Mapping[str, Any], script: Sequence[Any], limits: EpisodeLimits = LIMITS
) -> tuple[Trajectory, Mapping[str, float]]:
    """The trajectory of the task's episode, in which the policy says the script, and the metrics of the agent."""
    engine = ScriptedEngine(TOKENIZER, script)
    player = AgentPlayer(program)
    await player.start()
    try:
        ticket = replace(make_ticket("t/1"), task=as_task(row))
        trajectory = await EpisodeRunner(engine, Chat(TOKENIZER), player, limits).run(ticket, lambda: None)
    finally:
        await player.close()
    assert_trains_what_was_sampled(trajectory, engine)
    metrics = {name: value for name, value in player.counters().items() if name.startswith("agent/")}
    return trajectory, metrics


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_an_episode_is_one_branch_with_the_rewards_and_metrics_of_the_rubric(release: str, program: Program):
    row = task_of(program.python, TOY[release])
    for answer, right in [("It is 2.", 1.0), ("It is 5.", 0.0)]:
        trajectory, metrics = await played(program, row, [call(ADD[release], a=1, b=1), answer])
        assert trajectory.rewards == {"right": right, "brief": 0.5}
        assert metrics["agent/brief"] == 1.0, "unweighted"
        assert metrics["agent/calls" if release == "verifiers-0.4" else "agent/add_calls"] == 1.0
        assert [turn.role for turn in trajectory.turns] == [Role.PROMPT, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]


async def test_a_scorer_that_raises_fails_its_episode_alone(release: str, program: Program):
    sound = task_of(program.python, TOY[release])
    broken = {"extra": "broken"} if release == "verifiers-0.3" else {"task": {"fails": True}}
    with pytest.raises(AgentError, match="the scorer is not there"):
        await played(program, with_arguments(sound, **broken), ["2"])
    with pytest.raises(AgentError, match=r"extra_info\.verifiers is missing"):
        await played(program, {**sound, "extra_info": {}}, [])
    trajectory, _ = await played(program, sound, ["2"])
    assert trajectory.rewards["right"] == 1.0


async def test_an_episode_without_room_for_another_turn_is_scored_as_it_is(release: str, program: Program):
    row = task_of(program.python, TOY[release])
    script = [call(ADD[release], a=1, b=1)]
    trajectory, _ = await played(program, row, script, replace(LIMITS, max_turns=1))
    full = replace(LIMITS, max_tokens=len(trajectory) + 5, max_turn_tokens=100)
    overlong, _ = await played(program, row, script, full)
    assert len(overlong) == len(trajectory)
    assert trajectory.rewards == overlong.rewards
    assert trajectory.rewards["right"] == 0.0


@only_0_4
async def test_tools_of_a_taskset_run_in_the_process_with_their_tasks_and_states(program: Program):
    row = task_of(program.python, "toy_taskset")
    script = [call("adder_add", a=-1, b=2), call("adder_reveal"), call("adder_add", a=3, b=3), "2"]
    trajectory, metrics = await played(program, row, script)
    results = [
        TOKENIZER.decode(trajectory.tokens[turn.start : turn.end])
        for turn in trajectory.turns
        if turn.role is Role.TOOL
    ]
    for text, result in zip(["a must not be negative", "2", "6"], results, strict=True):
        assert text in result
    assert metrics["agent/calls"] == 1.0, "a call that raised changed no state"


@only_0_4
async def test_an_environment_that_answers_its_player_is_one_branch(program: Program):
    row = task_of(program.python, "toy_guessing")
    for readers in (1, 2):
        trajectory, _ = await played(program, row, [call("look_up", word="number"), "3", "7"])
        assert trajectory.rewards == {"found": 1.0}
        shown = TOKENIZER.decode(trajectory.tokens)
        assert f"looked up 1 times, and this book was read {readers} times" in shown
        assert shown.count("It is another one.") == 1
        assert sum(turn.role is Role.PROMPT for turn in trajectory.turns) == 1
    trajectory, _ = await played(program, row, ["3"], replace(LIMITS, max_turns=1))
    assert trajectory.rewards == {"found": 0.0}


@only_0_4
async def test_a_harness_that_comes_with_the_taskset_plays_it(program: Program):
    trajectory, _ = await played(program, task_of(program.python, "toy_harness"), ["once"])
    assert trajectory.rewards == {"said": 1.0}
    assert "How often? Tell me once." in TOKENIZER.decode(trajectory.tokens)


@pytest.mark.parametrize(
    ("release", "name", "more", "reason"),
    [
        (
            "verifiers-0.3",
            "toy_classic",
            {"arguments": '{"extra": "together"}'},
            "scores the episodes of a task together",
        ),
        ("verifiers-0.3", "toy_classic", {"arguments": '{"sighs": 3}'}, "unexpected keyword argument 'sighs'"),
        ("verifiers-0.3", "toy_nothing", {}, "toy_nothing cannot be loaded"),
        ("verifiers-0.4", "toy_taskset", {"arguments": '{"sighs": 3}'}, "sighs"),
        ("verifiers-0.4", "toy_taskset", {"arguments": "[3]"}, "must be a JSON object"),
        ("verifiers-0.4", "toy_nothing", {}, "toy_nothing cannot be loaded"),
        ("verifiers-0.4", "toy_debate", {}, "has the agents one, other"),
        ("verifiers-0.4", "toy_guessing", {}, "without end; set their number by --limit"),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused_by_the_command_that_writes_its_tasks(
    release: str,
    name: str,
    more: Mapping[str, Any],
    reason: str,
    python_with: Pythons,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.setenv("PYTHONPATH", str(TOYS))
    with pytest.raises(DataError, match=reason):
        convert("verifiers", name, tmp_path / "tasks.parquet", python=str(python_with(release)), **more)
    assert not (tmp_path / "tasks.parquet").exists()


@pytest.mark.parametrize("release", list(TOY))
def test_the_command_writes_a_task_file(
    release: str, python_with: Pythons, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PYTHONPATH", str(TOYS))
    written = convert("verifiers", TOY[release], tmp_path / "tasks.parquet", python=str(python_with(release)), limit=2)
    assert written == (2, 0)
    first, second = TaskFile(tmp_path / "tasks.parquet")
    assert [first.id, second.id] == [f"verifiers/{TOY[release]}/train/{index}" for index in range(2)]
    assert first.messages == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}]
    assert first.ground_truth == "2"
