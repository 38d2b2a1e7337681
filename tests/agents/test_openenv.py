"""The agent `openenv` against servers that answer as OpenEnv's do. The real package is in tests/environments."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from asyncrl.agents.chat_api.agent import load_agent
from asyncrl.agents.chat_api.result import AgentError, AgentResult
from asyncrl.agents.openenv import OpenEnvAgent, observation_text
from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.machine.ports import free_ports
from asyncrl.types import Task
from tests.agents.chat_api.support import LIMITS
from tests.agents.support import played, scores, served, shown, task_with
from tests.helpers import async_until

TEXT = {"type": "object", "properties": {"metadata": {"type": "object"}, "message": {"type": "string"}}}
FIELDS = {
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "row": {"type": "integer"}, "column": {"type": "integer"}},
    "required": ["row", "column"],
}
TOOLS = {"type": "object", "properties": {"type": {}, "tool_name": {"type": "string"}, "arguments": {"type": "object"}}}
LISTED = [{"name": "guess", "description": "Guesses.", "inputSchema": {"type": "object", "properties": {"number": {}}}}]


@dataclass
class Guessing:
    """A server whose episodes are over when the policy says the secret of `reset`. `full` and `broken` are how often it
    refuses an episode, and the step at which something happens in place of an answer."""

    schema: Mapping[str, Any] = field(default_factory=lambda: TEXT)
    full: int = 0
    at_step: int = 0
    happens: Any = None
    taken: list[Any] = field(default_factory=list)
    open: int = 0
    most: int = 0

    def routes(self) -> list[web.RouteDef]:
        async def schema(request: web.Request) -> web.Response:
            return web.json_response({"action": self.schema, "observation": {}, "state": {}})

        return [web.get("/schema", schema), web.get("/ws", self._play)]

    async def _play(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.full:
            self.full -= 1
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self.open += 1
        self.most = max(self.most, self.open)
        secret, steps = "", 0
        try:
            async for received in socket:
                assert received.type is WSMsgType.TEXT
                message = json.loads(received.data)
                self.taken.append(message)
                match message:
                    case {"type": "reset", "data": data}:
                        secret = str(data.get("secret", "7"))
                        await self._observe(socket, {"hint": "Guess a number."}, None)
                    case {"type": "mcp", "data": {"method": "tools/list", "id": id}}:
                        result = {"jsonrpc": "2.0", "id": id, "result": {"tools": LISTED}}
                        await socket.send_json({"type": "mcp", "data": result})
                    case {"type": "step", "data": data}:
                        steps += 1
                        if steps == self.at_step:
                            await self.happens(socket)
                        else:
                            await self._step(socket, data, secret)
        finally:
            self.open -= 1
        return socket

    async def _step(self, socket: web.WebSocketResponse, data: Mapping[str, Any], secret: str) -> None:
        said = str(data.get("message", data.get("row", data.get("arguments", {}).get("number"))))
        if said == "rude":
            faults = [{"loc": ["message"], "msg": "be polite"}]
            error = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": faults}
            await socket.send_json({"type": "error", "data": error})
            return
        found = said == secret
        observation: dict[str, Any] = {"hint": "found" if found else "wrong", "metadata": {"secret": secret}}
        if "tool_name" in data:
            content = [{"type": "text", "text": observation["hint"]}]
            observation = {
                "tool_name": data["tool_name"],
                "result": {"content": content, "is_error": False},
                "error": None,
            }
        await self._observe(socket, observation, 1.0 if found else -0.25, found)

    async def _observe(self, socket: web.WebSocketResponse, observation: Any, reward: Any, done: bool = False) -> None:
        await socket.send_json(
            {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}
        )


async def test_the_answer_of_the_policy_is_the_action_and_rewards_of_steps_are_those_of_turns():
    game = Guessing()
    async with served(game.routes()) as url:
        agent = OpenEnvAgent(url)
        trajectory = await played(agent, task_with({"openenv": '{"secret": 9}'}), ["rude", "3", "9", "never"])
    assert scores(trajectory) == [None, -0.25, 1.0]
    assert trajectory.rewards == {}
    assert len(trajectory.branches) == 1
    prompt, refused, wrong = shown(trajectory)
    assert "Play.\n\nGuess a number." in prompt
    assert "Error: Invalid message: message: be polite" in refused
    assert "wrong" in wrong
    assert "secret" not in wrong, "metadata is not for the policy"
    assert game.taken[0] == {"type": "reset", "data": {"secret": 9}}
    assert [each["data"] for each in game.taken[1:]] == [{"message": "rude"}, {"message": "3"}, {"message": "9"}]
    assert game.open == 0
    assert agent.counters() | {"agent_server_errors": 0} == {
        "agent_server_started": 1,
        "agent_server_unavailable": 0,
        "agent_server_lost": 0,
        "agent_server_errors": 0,
    }
    assert agent.counters()["agent_server_errors"] == 1


async def test_tools_of_an_environment_are_the_policys_and_other_actions_are_one_tool():
    game = Guessing(TOOLS)
    calls = [call_of("guess", number=3), call_of("guess", number=7), "never"]
    async with served(game.routes()) as url:
        trajectory = await played(OpenEnvAgent(url), task_with({}), calls)
    assert scores(trajectory) == [-0.25, 1.0]
    assert game.taken[-1]["data"] == {"type": "call_tool", "tool_name": "guess", "arguments": {"number": 7}}
    assert "wrong" in shown(trajectory)[1]

    board = Guessing(FIELDS)
    async with served(board.routes()) as url:
        trajectory = await played(OpenEnvAgent(url), task_with({}), [call_of("step", row=7, column=2)])
    assert scores(trajectory) == [1.0]
    assert board.taken[-1]["data"] == {"row": 7, "column": 2}


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_an_answer_without_a_call_or_a_cut_one_ends_the_episode_and_so_do_limits():
    game = Guessing(TOOLS)
    async with served(game.routes()) as url:
        trajectory = await played(OpenEnvAgent(url), task_with({}), [call_of("guess", number=3), "I give up."])
        assert scores(trajectory) == [-0.25, None]
        agent = OpenEnvAgent(url, action="message")
        trajectory = await played(agent, task_with({}), ["1", "2", "3"], replace(LIMITS, max_turns=2))
        assert scores(trajectory) == [-0.25, -0.25]
        assert trajectory.finish == "truncated"
        steps = len(game.taken)
        trajectory = await played(agent, task_with({}), ["7 " * 500], replace(LIMITS, max_turn_tokens=20))
        assert scores(trajectory) == [None]
        assert len(game.taken) == steps + 1, "only the reset"


async def test_an_episode_begins_once_the_server_has_a_free_session():
    game, requests = Guessing(), list[int]()
    async with served(game.routes()) as url:
        agent = OpenEnvAgent(url, sessions=1)
        episodes = [
            played(agent, task_with({}), ["7"], begin=lambda: requests.append(len(game.taken))) for _ in range(3)
        ]
        await asyncio.gather(*episodes)
    assert 0 == requests[0] < requests[1] < requests[2], "each begins after the steps of the one before"


async def test_an_agent_of_a_derived_class_is_called():
    class Halved(OpenEnvAgent):
        async def __call__(self, task: Task, base_url: str, api_key: str) -> AgentResult:
            found = await super().__call__(task, base_url, api_key)
            return AgentResult(turns=[None if each is None else each / 2 for each in found.turns])

    async with served(Guessing().routes()) as url:
        assert scores(await played(Halved(url), task_with({}), ["7"])) == [0.5]


@pytest.mark.slow
async def test_a_server_that_is_full_or_starts_later_is_asked_again():
    game, port = Guessing(full=2), free_ports(1)
    agent = OpenEnvAgent(f"http://127.0.0.1:{port}", sessions=1)
    episodes = [asyncio.create_task(played(agent, task_with({}), ["7"])) for _ in range(3)]
    await async_until(lambda: agent.counters()["agent_server_unavailable"] > 0)
    async with served(game.routes(), port):
        assert [scores(each) for each in await asyncio.gather(*episodes)] == [[1.0]] * 3
    assert agent.counters()["agent_server_unavailable"] >= 3
    assert game.most == 1


async def ends(socket: web.WebSocketResponse) -> None:
    await socket.close()


async def talks(socket: web.WebSocketResponse) -> None:
    await socket.send_str("hello")


async def floods(socket: web.WebSocketResponse) -> None:
    await socket.send_str("x" * (1 << 20))


async def is_silent(socket: web.WebSocketResponse) -> None:
    await asyncio.Event().wait()


async def rewards_oddly(socket: web.WebSocketResponse) -> None:
    await socket.send_str('{"type": "observation", "data": {"observation": {}, "reward": NaN, "done": false}}')


async def rewards_hugely(socket: web.WebSocketResponse) -> None:
    whole = "9" * 400
    await socket.send_str(
        f'{{"type": "observation", "data": {{"observation": {{}}, "reward": {whole}, "done": false}}}}'
    )


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (ends, "ended the connection"),
        (talks, "not JSON"),
        (floods, "ended the connection"),
        pytest.param(is_silent, "took more than", marks=pytest.mark.slow),
        (rewards_oddly, "not a finite number"),
        (rewards_hugely, "not a finite number"),
    ],
)
async def test_a_server_that_is_lost_or_makes_no_sense_fails_its_episode_alone(happens: Any, reason: str):
    game = Guessing(at_step=2, happens=happens)
    async with served(game.routes()) as url:
        agent = OpenEnvAgent(url, timeout_s=2.0, max_mb=0.5)
        with pytest.raises(AgentError, match=reason):
            await played(agent, task_with({}), ["1", "2"])
        assert agent.counters()["agent_server_lost"] == 1
        assert scores(await played(agent, task_with({}), ["7"])) == [1.0]


async def test_a_server_that_is_down_or_leads_elsewhere_fails_the_episode():
    port = free_ports(1)
    agent = OpenEnvAgent(f"http://127.0.0.1:{port}", start_s=0.1)
    with pytest.raises(AgentError, match=r"the episode could not begin within 0\.1 s.*cannot be reached"):
        await played(agent, task_with({}), ["1"])
    assert agent.counters()["agent_server_unavailable"] == 1
    assert agent.counters()["agent_server_started"] == 0

    game, asked = Guessing(), []

    async with served(game.routes()) as target:

        async def lead(request: web.Request) -> web.Response:
            asked.append(request.path)
            return web.Response(status=302, headers={"Location": f"{target}{request.path}"})

        async with served([web.get("/{path}", lead)]) as url:
            with pytest.raises(AgentError, match="a redirection"):
                await played(OpenEnvAgent(url, start_s=0.01), task_with({}), ["1"])
    assert asked
    assert not game.taken


async def test_a_schema_that_is_none_is_asked_for_again():
    answers = [{"detail": "starting"}, {"action": TEXT}]

    async def schema(request: web.Request) -> web.Response:
        return web.json_response(answers.pop(0))

    async with served([web.get("/schema", schema), *Guessing().routes()[1:]]) as url:
        agent = OpenEnvAgent(url)
        with pytest.raises(AgentError, match="schema of an action is None"):
            await played(agent, task_with({}), ["7"])
        for _ in range(2):
            assert scores(await played(agent, task_with({}), ["7"])) == [1.0]


async def test_a_refused_connection_shows_no_key_of_the_headers():
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401)

    async with served([web.get("/ws", refuse)]) as url:
        agent = OpenEnvAgent(url, start_s=0.01, headers={"A": "s3cret"})
        with pytest.raises(AgentError, match="cannot be reached: 401") as caught:
            await played(agent, task_with({}), ["7"])
    assert "s3cret" not in str(caught.value)


async def test_headers_have_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MAZE_KEY", "s3cret")
    keys = set()

    @web.middleware
    async def note(request: web.Request, handler: Any) -> Any:
        keys.add(request.headers.get("Authorization"))
        return await handler(request)

    game = Guessing()

    async def schema(request: web.Request) -> web.Response:
        keys.add(request.headers.get("Authorization"))
        return web.json_response({"action": TEXT})

    async with served([web.get("/schema", schema), *game.routes()[1:]]) as url:
        await played(OpenEnvAgent(url, headers={"Authorization": "Bearer $MAZE_KEY"}), task_with({}), ["7"])
        assert keys == {"Bearer s3cret"}
        monkeypatch.delenv("MAZE_KEY")
        with pytest.raises(AgentError, match="no variable MAZE_KEY"):
            await played(OpenEnvAgent(url, headers={"Authorization": "Bearer $MAZE_KEY"}), task_with({}), ["7"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "url"),
        ({"url": "127.0.0.1:8000"}, "give an address"),
        ({"url": "http://me:s3cret@a"}, "give a user name and a password in"),
        ({"url": "http://a", "max_mb": math.inf}, "number above 0"),
        ({"url": "http://a", "sessions": 0}, "whole number above 0"),
        ({"url": "http://a", "timeout_s": "60"}, "number above 0"),
        ({"url": "http://a", "headers": {"a": 3}}, "names to texts"),
        ({"url": "http://a", "speed": 3}, "speed"),
    ],
)
def test_options_are_checked_before_anything_starts(options: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        load_agent("openenv", options)


@pytest.mark.parametrize(
    ("observation", "field", "text"),
    [
        ({"hint": "3", "metadata": {"a": 1}}, None, "3"),
        ({"hint": "3", "left": 2, "note": ""}, None, '{"hint": "3", "left": 2}'),
        ({"hint": "3", "left": 2}, "left", "2"),
        ({"metadata": {}}, None, ""),
        ({"board": [[1, 0]]}, None, "[[1, 0]]"),
        ({"tool_name": "a", "result": None, "error": {"message": "not found"}}, None, "Error: not found"),
        ({"tool_name": "a", "result": {"data": 3}, "error": None}, None, '{"data": 3}'),
        ({"tool_name": "a", "result": {"content": [{"type": "image"}]}, "error": None}, None, "(image)"),
    ],
)
def test_an_observation_is_its_only_field_or_all_as_json(observation: Any, field: str | None, text: str):
    assert observation_text(observation, field) == text


def test_a_field_that_an_observation_lacks_is_named():
    with pytest.raises(UnavailableError, match="no field board; it has hint"):
        observation_text({"hint": "3"}, "board")


async def test_a_task_that_does_not_say_what_reset_gets_fails_with_the_reason():
    with pytest.raises(AgentError, match=r"extra_info\.openenv"):
        await played(OpenEnvAgent("http://127.0.0.1:1"), task_with({"openenv": "[3]"}), ["1"])
