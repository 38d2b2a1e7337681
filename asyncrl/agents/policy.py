"""Requests turns of the policy for the built-in agents. These agents use the endpoint of their episode, as all agents
do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp

from asyncrl.agents.chat_api.result import AgentError

FULL = ("context_length_exceeded", "turn_limit", "image_limit", "image_placeholder")
"""Error codes with which the endpoint refuses a request because the conversation cannot have another turn: it has no
room, or the policy wrote the placeholder of an image."""

Message = Mapping[str, Any]


class PolicyTurn(NamedTuple):
    """A turn of the policy as a message of the chat-completions API.

    `cut` is true if the turn reached its length limit. An environment does not get such a turn.
    """

    message: Message
    cut: bool

    @property
    def text(self) -> str:
        """The content of the message."""
        return self.message.get("content") or ""

    @property
    def calls(self) -> list[tuple[str, str, Mapping[str, Any]]]:
        """The id, name and arguments of each tool call."""
        return [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in self.message.get("tool_calls") or ()
        ]


class PolicyClient:
    """Requests turns of the policy in one episode. `turns` is the number of turns that it has received."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str) -> None:
        self.turns = 0
        self._http = http
        self._base_url = base_url

    async def request(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Send a request of the protocol at `path`, and return its answer. Returns None if the conversation has no room
        for another turn. Raises AgentError: the request was refused, or there is no room even for the first turn.
        """
        async with self._http.post(f"{self._base_url}/{path}", json=body) as response:
            answer: dict[str, Any] = await response.json()
        if response.status == 200:
            self.turns += 1
            return answer
        error = answer.get("error", {})
        if error.get("code") in FULL and self.turns:
            return None
        raise AgentError(f"the policy's endpoint refused a request: {error.get('message', answer)!s:.500}")

    async def chat(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> PolicyTurn | None:
        """Request the next turn of a conversation. Returns None and raises as `request` does."""
        body: dict[str, Any] = {"messages": messages}
        if tools:
            body["tools"] = tools
        answer = await self.request("chat/completions", body)
        if answer is None:
            return None
        [choice] = answer["choices"]
        return PolicyTurn(choice["message"], choice["finish_reason"] == "length")


@asynccontextmanager
async def policy_at(base_url: str, api_key: str) -> AsyncIterator[PolicyClient]:
    """Open a client of the policy at the endpoint of an episode."""
    headers = {"Authorization": f"Bearer {api_key}"}
    # This client has no timeout: the engine limits the time of a turn, and the actor the time of an episode.
    timeout = aiohttp.ClientTimeout(total=None)
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, cookie_jar=jar, trust_env=False) as http:
        yield PolicyClient(http, base_url)


def with_text_added(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with `text` added. If the last message is a text with the role `user`, `text` is added to
    this message. Otherwise `text` becomes a new user message. An empty text changes nothing."""
    if not text:
        return list(messages)
    last = messages[-1] if messages else None
    if last is None or last["role"] != "user" or not isinstance(last["content"], str):
        return [*messages, {"role": "user", "content": text}]
    return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}".lstrip("\n")}]
