"""The chat-completions API as far as an agent under training may use it: requests read, answers written.

What would bend the policy's distribution, or cannot be recorded as tokens, is refused with the reason. The temperature
is the ticket's: one that the agent names is ignored.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.actor.parsing import parse_tool_calls
from asyncrl.actor.template import call_id
from asyncrl.errors import RefusedError
from asyncrl.types import ToolCall

Message = Mapping[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_CALL = "<tool_call>"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: the whole conversation, in the form that templates take, and the tools in it.

    `max_tokens` is the agent's own limit of the answer, if any.
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    max_tokens: int | None
    stream: bool


def read_ask(body: Any) -> Ask:
    """The request in a decoded body. Raises RefusedError."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise RefusedError("a request must be an object with a list of messages")
    _refuse_unable(body)
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise RefusedError(f"max_tokens is {limit!r}; it must be a positive integer")
    names: dict[str, tuple[str, str]] = {}
    messages = tuple(_message(message, names) for message in body["messages"])
    return Ask(messages, _read_tools(body.get("tools") or []), limit, bool(body.get("stream")))


def _refuse_unable(body: Mapping[str, Any]) -> None:
    unable = {
        "n": body.get("n") not in (None, 1),
        "stop": bool(body.get("stop")),
        "logit_bias": bool(body.get("logit_bias")),
        "tool_choice": body.get("tool_choice") not in (None, "auto"),
        "response_format": (body.get("response_format") or {"type": "text"}).get("type") != "text",
    }
    for name, refused in unable.items():
        if refused:
            raise RefusedError(f"{name}={body[name]!r} would change what the policy samples; leave it out")


def _message(message: Any, names: dict[str, tuple[str, str]]) -> Message:
    """One message in one form, whatever the client made of it; `names` maps the ids of calls so far to their tools and
    to the ids that templates take."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise RefusedError(f"a message must have a role of {', '.join(_ROLES)}, not {message!s:.100}")
    role = "system" if message["role"] == "developer" else message["role"]
    content = _text(message.get("content"))
    if role == "tool":
        name, number = names.get(str(message.get("tool_call_id")), ("unknown", ""))
        known = {"tool_call_id": number} if number else {}
        return {"role": role, "name": str(message.get("name") or name), "content": content, **known}
    made = message.get("tool_calls") or () if role == "assistant" else ()
    calls = [_call(call, number, names) for number, call in enumerate(made)]
    return {"role": role, "content": content, **({"tool_calls": calls} if calls else {})}


def _text(content: Any) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list() if all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            return "".join(str(part.get("text", "")) for part in content)
    raise RefusedError("only text can be recorded; leave images and audio out")


def _call(call: Any, number: int, names: dict[str, tuple[str, str]]) -> Message:
    try:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        names[str(call.get("id", ""))] = function["name"], call_id(number)
        return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RefusedError(f"a tool call cannot be read: {error!r}") from error


def _read_tools(tools: Any) -> tuple[Message, ...]:
    """Tools as templates take them. Raises RefusedError: the policy's calls could not be checked against one."""
    for tool in tools if isinstance(tools, list) else [tools]:
        match tool:
            case {"function": {"name": str(), **rest}}:
                parameters = rest.get("parameters") or {}
                properties = parameters.get("properties") or {} if isinstance(parameters, dict) else None
                if isinstance(properties, dict) and all(isinstance(each, dict | bool) for each in properties.values()):
                    continue
        raise RefusedError(
            "a tool must be {type: function, function: {name, description, parameters}}, with a JSON schema for "
            f"parameters; got {tool!s:.200}"
        )
    return tuple(tools)


def calls_in(text: str, tools: Sequence[Message], one_call: bool = False) -> list[ToolCall]:
    """The calls that the policy's turn makes; none where one of them cannot be made as written, or where there are
    several and the template shows one call a turn only."""
    parsed = parse_tool_calls(text, {tool["function"]["name"]: tool["function"] for tool in tools})
    calls = [call for call in parsed if isinstance(call, ToolCall)]
    return calls if len(calls) == len(parsed) and not (one_call and len(calls) > 1) else []


def answer_message(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """The policy's turn as an API message: text and calls of tools, or where it makes none all of it as text."""
    if not calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": text.partition(_CALL)[0].strip() or None,
        "tool_calls": [
            {
                "id": f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in calls
        ],
    }


def read_answer(answer: Message) -> Message:
    """Our own answer as it will be read when the agent sends it back."""
    return _message(answer, {})


def completion(
    message: Mapping[str, Any], finish: str, prompt_tokens: int, sampled: int, created: int
) -> dict[str, Any]:
    """The body of an answer; `finish` is stop or length."""
    reason = "tool_calls" if "tool_calls" in message and finish == "stop" else finish
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": created,
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
        },
    }


def as_events(body: Mapping[str, Any]) -> bytes:
    """An answer as the stream of events that a client expects which asked for one: all of it in one piece."""
    choice = body["choices"][0]
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
    piece = {"index": 0, "delta": message, "finish_reason": choice["finish_reason"]}
    event = {**body, "object": "chat.completion.chunk", "choices": [piece]}
    return f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
