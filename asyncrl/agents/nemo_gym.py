"""The agent `nemo_gym`: plays episodes at a resources server of NeMo Gym (its protocol of release 0.4).

    POST /seed_session  ROW                      begins an episode, which a cookie identifies
    POST /TOOL          arguments of a call      returns the result for the policy
    POST /verify        ROW, {"response": ...}   returns the episode's reward

    POST /reset, /step                           only on servers in the style of Gymnasium

Servers in the style of Gymnasium have /reset and /step instead of the other three, and score each turn. ROW is a line
of NeMo Gym's data, with the prompt and the tools in `responses_create_params`. NeMo Gym and the policy's endpoint both
use OpenAI's Responses API, so the server gets exactly the items that the policy wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from asyncrl.agents.chat_api.result import MAX_METRICS, METRIC_NAME, AgentError, AgentResult
from asyncrl.agents.chat_api.waiting import WaitingAgent
from asyncrl.agents.policy import PolicyClient, policy_at
from asyncrl.agents.server import (
    EnvironmentServer,
    ServerClient,
    ServerOptions,
    ServerReply,
    is_finite,
    read_object,
    read_reward,
)
from asyncrl.errors import UnavailableError
from asyncrl.text import cut
from asyncrl.types import Task

FIELD = "nemo_gym"
"""The field of a task's `extra_info` that has a line of NeMo Gym's data, as an object or as JSON text."""

REWARD = "reward"
PARAMS = "responses_create_params"
TAKEN = ("input", "instructions", "tools", "tool_choice", "text", "max_output_tokens")
"""The fields of a row's `responses_create_params` that are sent to the policy. The sampling parameters in a row are not
sent: the run sets them."""

Item = Mapping[str, Any]


class NemoGymAgent(WaitingAgent):
    """Plays episodes with the resources server at `url`. `ServerOptions` describes the `options`. Raises ConfigError:
    an option has an impossible value."""

    def __init__(self, url: str, **options: Any) -> None:
        self._server = EnvironmentServer(ServerOptions(url, **options))

    def counters(self) -> Mapping[str, float]:
        return self._server.counters()

    async def wait_and_play(self, task: Task, base_url: str, api_key: str, begin: Callable[[], None]) -> AgentResult:
        """Play one episode. Raises AgentError: the task has no row, or the server or the policy's endpoint refused a
        request; UnavailableError: the server failed, or cannot be reached."""
        row = _row(task)
        async with self._server.client() as client, policy_at(base_url, api_key) as policy:
            begin()
            observation = await self._server.begin(lambda: _begin(client, row))
            async with self._server.playing():
                if observation is None:
                    return await self._with_tools(client, policy, row)
                return await _in_steps(client, policy, row, observation)

    async def _with_tools(self, client: ServerClient, policy: PolicyClient, row: Mapping[str, Any]) -> AgentResult:
        body = _request(row)
        given, response = list(body["input"]), {}
        while answer := await policy.request("responses", {**body, "input": given}):
            response = dict(answer)
            given += answer["output"]
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
            if not calls or answer["status"] != "completed":
                break
            given += [await self._called(client, call) for call in calls]
        response["output"] = given[len(body["input"]) :]
        found = _checked(await client.request("POST", "verify", {**row, "response": response}), "verify").json()
        reward = read_reward(found.get(REWARD))
        if reward is None:
            raise UnavailableError(f"the server's answer to /verify has no reward: {found!r:.200}")
        return AgentResult({REWARD: reward}, _metrics(found, row))

    async def _called(self, client: ServerClient, call: Item) -> Item:
        """Send a tool call to the server. The policy reads the result even if the server answers with an error status,
        as with NeMo Gym's own agents."""
        reply = await client.request("POST", quote(call["name"], safe=""), json.loads(call["arguments"]))
        self._server.counts.errors += reply.status >= HTTPStatus.BAD_REQUEST
        text = cut(reply.body.decode(errors="replace"), self._server.options.max_chars)
        return {"type": "function_call_output", "call_id": call["call_id"], "output": text}


async def _begin(client: ServerClient, row: Mapping[str, Any]) -> str | None:
    """Begin an episode. Returns the first observation of a server in the style of Gymnasium; None for other servers.

    Raises AgentError: the server refuses the row; UnavailableError: the server failed, or cannot be reached.
    """
    seeded = await client.request("POST", "seed_session", row)
    if seeded.status != HTTPStatus.NOT_FOUND:
        _checked(seeded, "seed_session")
        return None
    return _observation(_checked(await client.request("POST", "reset", row), "reset").json())


async def _in_steps(
    client: ServerClient, policy: PolicyClient, row: Mapping[str, Any], observation: str
) -> AgentResult:
    body = _request(row)
    given = [*body["input"], *_user(observation)]
    rewards: list[float | None] = []
    over = False
    while not over and (answer := await policy.request("responses", {**body, "input": given})):
        rewards.append(None)
        if answer["status"] != "completed":
            break
        given += answer["output"]
        step = _checked(await client.request("POST", "step", {**row, "response": answer}), "step").json()
        rewards[-1], over = read_reward(step.get(REWARD)), _is_over(step)
        info = step.get("info")
        for output in info.get("tool_outputs") or [] if isinstance(info, dict) else []:
            given.append({"type": "function_call_output", **output})
        given += _user(_observation(step))
    return AgentResult(turns=rewards)


def _checked(reply: ServerReply, path: str) -> ServerReply:
    """Return the `reply` from `path`. Raises AgentError: the server refused the request; UnavailableError: the server
    failed."""
    reason = f"/{path} answered with status {reply.status}: {reply.body[:500]!r}"
    if reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise UnavailableError(reason)
    if reply.status != HTTPStatus.OK:
        raise AgentError(reason)
    return reply


def _observation(found: Mapping[str, Any]) -> str:
    return str(found.get("observation") or "")


def _is_over(step: Mapping[str, Any]) -> bool:
    """True if the step ended the episode. Raises UnavailableError: its flags are not booleans."""
    flags = [step.get(name) or False for name in ("terminated", "truncated")]
    if not all(isinstance(flag, bool) for flag in flags):
        raise UnavailableError(f"the server answered a step with terminated and truncated as {flags!r:.100}")
    return any(flags)


def _user(text: str) -> list[Item]:
    return [{"type": "message", "role": "user", "content": text}] if text else []


def _request(row: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request to the policy, with a list as `input`."""
    params = row[PARAMS]
    body = {name: params[name] for name in TAKEN if params.get(name) is not None}
    given = body.get("input") or []
    return {**body, "input": _user(given) if isinstance(given, str) else given}


def _metrics(found: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in `found`, the answer of /verify. The reward, and the fields of the row that the answer repeats, are
    left out."""
    numbers = [
        (name, float(value))
        for name, value in found.items()
        if name not in row and name != REWARD and is_finite(value) and METRIC_NAME.fullmatch(name)
    ]
    return dict(numbers[:MAX_METRICS])


def _row(task: Task) -> Mapping[str, Any]:
    """The task's line of NeMo Gym's data. Raises AgentError: the task has no such line."""
    given = task.extra_info.get(FIELD)
    try:
        row: Any = read_object(given) if isinstance(given, str) else given
    except UnavailableError:
        row = None
    match row:
        case {"responses_create_params": {"input": str() | Sequence()}}:
            return dict(row)
    raise AgentError(f"task {task.id} is not from `asyncrl data nemo-gym`: extra_info.{FIELD} is {given!r:.100}")
