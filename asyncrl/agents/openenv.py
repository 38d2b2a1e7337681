"""The agent `openenv`: plays episodes at a server of OpenEnv (its protocol of release 0.10).

    GET URL/schema                           the schema of an action
    WebSocket URL/ws                         one episode
      {"type": "reset", "data": {"seed": 3}} -> {"type": "observation", "data": {observation, reward, done}}
      {"type": "step", "data": ACTION}       -> the same

If an action's only field is a text, the policy's answer becomes the value of that field. If the environment has tools
(`call_tool`), the policy gets these tools. Any other action becomes a tool `step`, whose parameters are the action's
fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.agents.chat_api.result import AgentError, AgentResult
from asyncrl.agents.chat_api.waiting import WaitingAgent
from asyncrl.agents.policy import Message, PolicyClient, PolicyTurn, policy_at, with_text_added
from asyncrl.agents.server import (
    EnvironmentServer,
    ServerClient,
    ServerOptions,
    ServerSocket,
    read_object,
    read_reward,
)
from asyncrl.errors import RefusedError, UnavailableError
from asyncrl.machine.finishing import finish
from asyncrl.text import cut
from asyncrl.types import Task

FIELD = "openenv"
"""The field of a task's `extra_info` that has the arguments of `reset`, as an object or as JSON text."""

STEP = "step"
METADATA = "metadata"
AT_THE_BEGINNING = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
"""Codes with which a server refuses to begin an episode."""


class OpenEnvStep(NamedTuple):
    """The result of a reset or a step."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


@dataclass(frozen=True)
class Actions:
    """The way in which the policy acts. If `text_field` is given, the policy's answer becomes the value of this field
    of an action. Otherwise the policy calls `tools`.

    `as_action` makes an action from a tool's name and arguments.
    """

    text_field: str | None = None
    tools: Sequence[Message] = ()
    as_action: Callable[[str, Mapping[str, Any]], Mapping[str, Any]] = lambda name, arguments: arguments


class OpenEnvAgent(WaitingAgent):
    """Plays episodes with the server at `url`. Raises ConfigError: see `ServerOptions`.

    `action` names the field of an action that gets the policy's answer. It is needed if the schema does not show which
    field that is. `observation` names the field of an observation that the policy reads; None: see `observation_text`.
    For the `options` see `ServerOptions`.
    """

    def __init__(self, url: str, action: str | None = None, observation: str | None = None, **options: Any) -> None:
        self._server = EnvironmentServer(ServerOptions(url, **options))
        self._action = action
        self._observation = observation
        self._schema: Mapping[str, Any] | None = None

    def counters(self) -> Mapping[str, float]:
        return self._server.counters()

    async def wait_and_play(self, task: Task, base_url: str, api_key: str, begin: Callable[[], None]) -> AgentResult:
        """Play one episode. Raises AgentError: the task's arguments are malformed, the policy's endpoint refused a
        request, or the policy had no turn; RefusedError: the environment refused the reset; UnavailableError: the
        server failed, or cannot be reached."""
        arguments = _reset_data(task)
        async with self._server.client() as client, policy_at(base_url, api_key) as policy:
            begin()
            game, first = await self._server.begin(lambda: self._begin(client, arguments))
            try:
                async with self._server.playing():
                    actions = await self._actions(client, game)
                    messages = with_text_added(task.messages, self._shown(first.observation))
                    return AgentResult(turns=await self._play(policy, game, actions, messages, first.done))
            finally:
                await finish(game.close())

    async def _begin(self, client: ServerClient, arguments: Mapping[str, Any]) -> tuple[OpenEnvSession, OpenEnvStep]:
        game = OpenEnvSession(await client.socket("ws"))
        try:
            return game, await game.act("reset", arguments)
        except BaseException:
            await finish(game.close())
            raise

    async def _actions(self, client: ServerClient, game: OpenEnvSession) -> Actions:
        if self._action is not None:
            return Actions(self._action)
        schema = self._schema or (await client.request("GET", "schema")).json().get("action")
        if not isinstance(schema, dict) or not isinstance(fields := schema.get("properties"), dict):
            raise UnavailableError(
                f"the server's schema of an action is {schema!r:.200}, not an object with properties"
            )
        self._schema = schema
        if {"tool_name", "arguments"} <= fields.keys():
            return Actions(tools=await game.tools(), as_action=_call_tool)
        fields = {name: each for name, each in fields.items() if name != METADATA}
        [(name, only)] = fields.items() if len(fields) == 1 else [(None, {})]
        if name and isinstance(only, dict) and only.get("type") == "string" and not only.get("enum"):
            return Actions(name)
        parameters = {**schema, "properties": fields}
        function = {"name": STEP, "description": str(schema.get("description") or ""), "parameters": parameters}
        return Actions(tools=[{"type": "function", "function": function}])

    async def _play(
        self, policy: PolicyClient, game: OpenEnvSession, actions: Actions, messages: list[Message], done: bool
    ) -> list[float | None]:
        """Let policy and environment take turns. Returns the rewards of the policy's turns."""
        rewards: list[float | None] = []
        while not done and (answer := await policy.chat(messages, actions.tools)) is not None:
            rewards.append(None)
            if answer.cut or (actions.text_field is None and not answer.calls):
                break
            messages.append(answer.message)
            following, rewards[-1], done = await self._react(game, actions, answer)
            messages += following
        if not policy.turns:
            raise AgentError("the episode ended before the policy's first turn")
        return rewards

    async def _react(
        self, game: OpenEnvSession, actions: Actions, answer: PolicyTurn
    ) -> tuple[list[Message], float | None, bool]:
        """Send a turn of the policy to the environment. Returns the messages that follow the turn, the turn's reward,
        and true if the episode is over."""
        if actions.text_field is not None:
            text, step = await self._step(game, {actions.text_field: answer.text})
            return [{"role": "user", "content": text}], step.reward, step.done
        following: list[Message] = []
        rewards: list[float] = []
        for id, name, arguments in answer.calls:
            text, step = await self._step(game, actions.as_action(name, arguments))
            following.append({"role": "tool", "tool_call_id": id, "content": text})
            rewards += [] if step.reward is None else [step.reward]
            if step.done:
                break
        return following, sum(rewards) if rewards else None, step.done

    async def _step(self, game: OpenEnvSession, action: Mapping[str, Any]) -> tuple[str, OpenEnvStep]:
        """Take a step. Returns the text for the policy, and the step's result. If the environment refused the action,
        the text has the reason, and the result is empty."""
        try:
            step = await game.act("step", action)
        except RefusedError as error:
            self._server.counts.errors += 1
            return cut(f"Error: {error}", self._server.options.max_chars), OpenEnvStep({}, None, False)
        return self._shown(step.observation), step

    def _shown(self, observation: Mapping[str, Any]) -> str:
        """The text of an observation that the policy reads."""
        return cut(observation_text(observation, self._observation), self._server.options.max_chars)


class OpenEnvSession:
    """One episode on a `socket`."""

    def __init__(self, socket: ServerSocket) -> None:
        self._socket = socket

    async def act(self, kind: str, data: Mapping[str, Any]) -> OpenEnvStep:
        """Send a reset or a step. Raises RefusedError: the environment refused it; UnavailableError: the server failed,
        or cannot be reached."""
        found = await self._data({"type": kind, "data": data}, "observation")
        match found:
            case {"observation": dict(observation), "done": bool(done)}:
                return OpenEnvStep(observation, read_reward(found.get("reward")), done)
        raise UnavailableError(f"the server answered a {kind} with {found!r:.200}")

    async def tools(self) -> list[Message]:
        """Request the environment's tools. Raises RefusedError: the server refused the request; UnavailableError: the
        server failed, or its list of tools is empty or malformed."""
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        found = await self._data({"type": "mcp", "data": request}, "mcp")
        match found:
            case {"result": {"tools": list(tools)}} if tools and all(map(_is_tool, tools)):
                return [{"type": "function", "function": _function(tool)} for tool in tools]
        raise UnavailableError(f"the server listed its tools as {found!r:.300}")

    async def close(self) -> None:
        await self._socket.close()

    async def _data(self, message: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        answer = await self._socket.request(message)
        match answer:
            case {"type": "error", "data": dict(error)} if error.get("code") in AT_THE_BEGINNING:
                raise UnavailableError(f"the server does not begin an episode: {error.get('message')!s:.300}")
            case {"type": "error", "data": dict(error)}:
                raise RefusedError(_reason(error))
            case {"type": str(found), "data": dict(data)} if found == kind:
                return data
        raise UnavailableError(f"the server answered {message['type']} with {answer!r:.200}")


def observation_text(observation: Mapping[str, Any], field: str | None = None) -> str:
    """Convert an observation to a text: the observation's `field`, if given. Otherwise the result of a tool, or the
    only field, or all fields as JSON.

    Raises UnavailableError: the observation lacks `field`.
    """
    if field is not None:
        if field not in observation:
            raise UnavailableError(f"an observation has no field {field}; it has {', '.join(observation)}")
        return _text(observation[field])
    if "tool_name" in observation and ("result" in observation or "error" in observation):
        return _tool_result(observation)
    fields = {
        name: value for name, value in observation.items() if name != METADATA and value not in (None, "", [], {})
    }
    return _text(next(iter(fields.values()))) if len(fields) == 1 else _text(fields) if fields else ""


def _tool_result(observation: Mapping[str, Any]) -> str:
    match observation.get("error"):
        case {"message": message}:
            return f"Error: {message}"
    match observation.get("result"):
        case {"content": list(parts), **rest} if all(isinstance(part, dict) for part in parts):
            text = "\n".join(str(part.get("text", f"({part.get('type')})")) for part in parts)
            return f"Error: {text}" if rest.get("is_error") or rest.get("isError") else text
        case None:
            return ""
        case result:
            return _text(result)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _call_tool(name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


def _is_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("name"), str)


def _function(tool: Mapping[str, Any]) -> Message:
    parameters = tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}}
    return {"name": tool["name"], "description": str(tool.get("description") or ""), "parameters": parameters}


def _reason(error: Mapping[str, Any]) -> str:
    """The server's reason for a refusal, with the action's faulty fields."""
    message = str(error.get("message"))
    match error.get("errors"):
        case list(faults):
            each = (
                f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in faults if isinstance(one, dict)
            )
            return f"{message}: {'; '.join(each)}"
    return message


def _reset_data(task: Task) -> Mapping[str, Any]:
    """The arguments of `reset` for a task. Raises AgentError: they are not an object."""
    given = task.extra_info.get(FIELD) or {}
    try:
        return read_object(given) if isinstance(given, str) else dict(given)
    except (UnavailableError, TypeError, ValueError) as error:
        raise AgentError(
            f"task {task.id} has extra_info.{FIELD}={given!r:.100}; give the arguments of reset as a JSON object"
        ) from error
