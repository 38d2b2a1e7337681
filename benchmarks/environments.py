"""Measures the cost of an episode without its generation, for each kind of tools, environments and agents.

Every episode has two turns: the policy calls a tool for 5*3, and answers. The engine takes no time, so the actor is
measured with its template, recorder, tools and endpoint. Processor time is of the actor's process and, separately, of
the processes that it starts. The first round does not count: it starts processes that later rounds use, too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from numpy.typing import NDArray

from asyncrl.actor.from_config import open_runner
from asyncrl.chat.chat import Chat
from asyncrl.commands.demo.tokenizer import END_OF_TURN, build_tokenizer
from asyncrl.config.schema import ActorConfig, TrainConfig
from asyncrl.data.converters import gym, verifiers
from asyncrl.engine.base import EngineStats, Generation
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.machine.ports import free_ports
from asyncrl.types import Purpose, Sampling, Task, Ticket
from benchmarks.record import write_result
from benchmarks.serving import load

AT_ONCE, EPISODES = 256, 512
LIMIT_S = 300.0
ENOUGH_S = 4.0
"""Each kind is measured in full rounds for at least this number of seconds."""

PROGRAMS = 2
"""The number of agent programs on a machine with two cores. Each plays one episode after another."""

TOYS = Path(__file__).parents[1] / "tests" / "environments" / "packages"
FIELD = "verifiers"
VERIFIERS = {"0.3": ("toy_classic", "add"), "0.4": ("toy_taskset", "adder_add")}
"""Our environment and its tool for each release of verifiers."""

_QUESTION = [{"role": "system", "content": "Add."}, {"role": "user", "content": "5 + 3?"}]
TASKS: Mapping[str, Mapping[str, Any]] = {
    "0.3": {"prompt": _QUESTION, "answer": "8", "example_id": 0},
    "0.4": {"idx": 0, "prompt": "5 + 3?", "system_prompt": "Add.", "answer": "8"},
}

PROGRAM = """
import http.client, json, sys, urllib.parse
parameters = {"type": "object", "properties": {"a": {}, "b": {}}}
tools = [{"type": "function", "function": {"name": "multiply", "parameters": parameters}}]
for line in sys.stdin:
    asked = json.loads(line)
    url = urllib.parse.urlsplit(asked["base_url"])
    server = http.client.HTTPConnection(url.netloc)
    headers = {"Authorization": "Bearer " + asked["api_key"], "Content-Type": "application/json"}
    messages = asked["task"]["messages"]
    while True:
        body = json.dumps({"messages": messages, "tools": tools})
        server.request("POST", url.path + "/chat/completions", body, headers)
        answer = json.load(server.getresponse())["choices"][0]["message"]
        if not answer.get("tool_calls"):
            break
        messages += [answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "15"}]
    print(json.dumps({"rewards": {"solved": 1.0}}))
"""
"""An agent that is a program and needs only Python's standard library."""


class Sums:
    """An environment class."""

    def reset(self, **row: Any) -> None:
        self.calls = 0

    def multiply(self, a: int, b: int) -> str:
        """Multiplies two numbers.

        Args:
            a: the first
            b: the second
        """
        self.calls += 1
        return str(a * b)

    def get_reward(self) -> float:
        return float(self.calls)


async def solve(task: Task, base_url: str, api_key: str) -> dict[str, float]:
    """An agent in the actor's process that does the same as the program."""
    function = {"name": "multiply", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
    body: dict[str, Any] = {"messages": list(task.messages), "tools": [{"type": "function", "function": function}]}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
        while True:
            async with session.post(f"{base_url}/chat/completions", json=body) as response:
                response.raise_for_status()
                answer = (await response.json())["choices"][0]["message"]
            if not answer.get("tool_calls"):
                return {"solved": 1.0}
            result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "15"}
            body["messages"] += [answer, result]


class InstantEngine:
    """Calls the tool in a session's first turn, and answers in its second."""

    version = 0
    takes_grammars = False

    def __init__(self, call: Mapping[str, Any]) -> None:
        tokenizer = build_tokenizer()
        said = (f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "It is 15.")
        self._turns = [
            np.array(tokenizer.encode(text + END_OF_TURN, add_special_tokens=False), np.int32) for text in said
        ]
        self._begun: set[str] = set()

    async def generate(
        self, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int], session: str, images: Any = ()
    ) -> Generation:
        await asyncio.sleep(0)
        # Each branch of an episode has its own session, so each begins with the call.
        turn = self._turns[session in self._begun]
        self._begun.add(session)
        return Generation(turn, np.full(len(turn), -0.5, np.float32), np.zeros(len(turn), np.int32), "stop")

    def release(self, session: str) -> None:
        self._begun.discard(session)

    async def wait_for_version(self, version: int, pin: str | None = None) -> None:
        pass

    async def update_weights(self, version: int, weights: Any, check: Any = None) -> None:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        return EngineStats(0, 1.0, 0.0, 0)

    async def close(self) -> None:
        pass


@dataclass(frozen=True)
class Way:
    """A kind of tools, environment or agent: options of the actor, and the call that the policy makes."""

    options: Mapping[str, Any]
    call: Mapping[str, Any] = field(default_factory=lambda: {"name": "multiply", "arguments": {"a": 5, "b": 3}})
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    episodes: int | None = None
    """The episodes of a round, if the usual number would take too long. None: the usual number."""
    server: Sequence[str] = ()
    """A program that runs during the measurement."""


def ways(pythons: Mapping[str, str]) -> dict[str, Way]:
    """Map the name of each kind to its options. `pythons` maps releases of verifiers to Pythons that have them."""
    server = {"command": sys.executable, "args": ["-m", "benchmarks.environment_server"], "cwd": str(Path.cwd())}
    calculate = {"name": "calculator", "arguments": {"expression": "5*3"}}
    programs = {"tools": [], "agent_processes": PROGRAMS}
    agent = [sys.executable, "-c", PROGRAM]
    port = free_ports(1)
    game = {"game": "text_game:TwoMoves", "args": {}, "seed": 0}
    at_server = {"agent": "openenv", "agent_options": {"url": f"http://127.0.0.1:{port}", "sessions": AT_ONCE}}
    found = {
        "tools": Way({"tools": ["calculator"]}, calculate),
        "environment class": Way({"tools": [], "environment": "benchmarks.environments.Sums"}),
        "agent in the actor": Way({"tools": [], "agent": "benchmarks.environments.solve"}),
        "MCP, one session for all": Way({"tools": [], "mcp_servers": {"sums": {**server, "shared": True}}}),
        "MCP, a session an episode": Way(
            {"tools": [], "mcp_servers": {"sums": {**server, "sessions": 8}}}, episodes=64
        ),
        "agent program": Way({**programs, "agent_command": agent}),
        "agent program, a new one for each episode": Way({"tools": [], "agent_command": agent}),
        "game in a program": Way(
            {
                **programs,
                "agent_command": [sys.executable, str(gym.PROGRAM)],
                "agent_environment": {"PYTHONPATH": str(Path(__file__).parent)},
            },
            extra_info={gym.FIELD: json.dumps(game)},
        ),
        "OpenEnv server": Way(
            {"tools": [], **at_server}, server=(sys.executable, "-m", "benchmarks.text_game", str(port))
        ),
    }
    for release, python in pythons.items():
        module, tool = VERIFIERS[release]
        extra_info = {FIELD: json.dumps({"env": module, "args": {}, "task": TASKS[release]})}
        options = {
            **{"agent_command": [python, str(verifiers.PROGRAM)], "agent_environment": {"PYTHONPATH": str(TOYS)}},
            **programs,
        }
        found[f"verifiers {release}"] = Way(options, {"name": tool, "arguments": {"a": 5, "b": 3}}, extra_info)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=EPISODES, help="episodes of a round")
    parser.add_argument("--only", nargs="*", help="names of the kinds to measure (default: all)")
    for release in VERIFIERS:
        parser.add_argument(f"--verifiers-{release}", metavar="PYTHON", help="a Python with this release of verifiers")
    given = parser.parse_args()
    pythons = {release: python for release in VERIFIERS if (python := getattr(given, f"verifiers_{release}"))}
    chosen = {name: way for name, way in ways(pythons).items() if not given.only or name in given.only}
    result: dict[str, Any] = {"load_before": load(), "at_once": AT_ONCE, "ways": {}}
    for name, way in chosen.items():
        result["ways"][name] = asyncio.run(measured(way, way.episodes or given.episodes))
        print(name, json.dumps(result["ways"][name]))
    result["load_after"] = load()
    print(write_result("environments", result))


async def measured(way: Way, episodes: int) -> dict[str, float]:
    config = TrainConfig(actor=ActorConfig(**way.options))
    async with AsyncExitStack() as stack:
        if way.server:
            server = stack.enter_context(subprocess.Popen(way.server))
            stack.callback(server.kill)
        engine: Any = InstantEngine(way.call)
        runner = await open_runner(config, engine, stack, chat=Chat(build_tokenizer()))
        await played(runner, way, "first", min(episodes, AT_ONCE))
        before, began, count, wall = _seconds(), time.perf_counter(), 0, 0.0
        while wall < ENOUGH_S:
            await played(runner, way, f"measured-{count}", episodes)
            count += episodes
            wall = time.perf_counter() - began
        own, others = (after - earlier for after, earlier in zip(_seconds(), before, strict=True))
    return {
        "actor_ms": round(own / count * 1000, 2),
        "others_ms": round(others / count * 1000, 2),
        "episodes_per_s": round(count / wall, 1),
    }


async def played(runner: EpisodeRunner, way: Way, name: str, episodes: int) -> None:
    """Play the episodes, AT_ONCE at once, and check that all end well."""
    numbers = iter(range(episodes))

    async def work() -> None:
        for number in numbers:
            ticket = _ticket(f"{name}-{number}", way)
            async with asyncio.timeout(LIMIT_S):
                trajectory = await runner.run(ticket, lambda: None)
            if len(trajectory.turns) != 4:
                raise RuntimeError(f"an episode has {len(trajectory.turns)} turns, with {trajectory.finish}")

    async with asyncio.TaskGroup() as group:
        for _ in itertools.repeat(None, AT_ONCE):
            group.create_task(work())


def _ticket(name: str, way: Way) -> Ticket:
    question = {"role": "user", "content": "What is 5*3?"}
    task = Task(name, [question], "15", "benchmark", extra_info=way.extra_info)
    return Ticket(name, task, name, 0, Purpose.TRAIN, 1.0, 0)


def _seconds() -> tuple[float, float]:
    """Processor seconds of this process, and of the processes that it started, ended or running."""
    own = psutil.Process()
    times = own.cpu_times()
    others = times.children_user + times.children_system
    for child in own.children(recursive=True):
        try:
            of_child = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        others += of_child.user + of_child.system + of_child.children_user + of_child.children_system
    return times.user + times.system, others


if __name__ == "__main__":
    main()
