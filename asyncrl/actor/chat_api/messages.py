"""The messages of the chat-completions API: reads requests, writes answers.

A request that would change the policy's distribution, or that cannot be recorded as tokens, is refused with the reason.
A grammar changes it, too, but what it does is recorded (docs/structured.md).
The temperature is the ticket's; a temperature in the request is ignored.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.actor.episode import Completion
from asyncrl.actor.recorder import CompletionRequest, Message
from asyncrl.actor.template import POLICY_ID, call_id, with_reasoning
from asyncrl.errors import RefusedError
from asyncrl.grammar import FORMS, KEY, read_grammar

_GRAMMARS_OF_SERVERS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice"),
    *("regex", "ebnf", "json_schema", "structural_tag"),
)
"""Where requests to vLLM and to SGLang have grammars."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_request(body: Any) -> tuple[CompletionRequest, bool]:
    """The request in a decoded body, and whether the client wants a stream. Raises RefusedError."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise RefusedError("a request must be an object with a list of messages")
    _refuse_unsupported(body)
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise RefusedError(f"max_tokens is {limit!r}; it must be a positive integer")
    grammar = read_grammar(body.get(KEY))
    request = CompletionRequest(read_messages(body["messages"]), _read_tools(body.get("tools") or []), limit, grammar)
    return request, bool(body.get("stream"))


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    unsupported = {
        "n": body.get("n") not in (None, 1),
        "stop": bool(body.get("stop")),
        "logit_bias": bool(body.get("logit_bias")),
        "tool_choice": body.get("tool_choice") not in (None, "auto"),
    }
    for name, refused in unsupported.items():
        if refused:
            raise RefusedError(f"{name}={body[name]!r} would change what the policy samples; leave it out")
    for name in _GRAMMARS_OF_SERVERS:
        if body.get(name):
            raise RefusedError(f"{name}={body[name]!r:.200}: give the grammar as {KEY}: {FORMS}")


def read_messages(messages: Sequence[Any]) -> tuple[Message, ...]:
    """Messages of the API in the form that templates take. Raises RefusedError."""
    names: dict[str, tuple[str, str]] = {}
    return tuple(_message(message, names) for message in messages)


def _message(message: Any, names: dict[str, tuple[str, str]]) -> Message:
    """A message in the form that templates take, whatever form it has. `names` maps the ids of earlier calls to their
    tools and to the ids that templates take."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise RefusedError(f"a message must have a role of {', '.join(_ROLES)}, not {message!s:.100}")
    role = "system" if message["role"] == "developer" else message["role"]
    content = _text(message.get("content"))
    if role == "tool":
        name, number = names.get(str(message.get("tool_call_id")), ("unknown", ""))
        known = {"tool_call_id": number} if number else {}
        return {"role": role, "name": str(message.get("name") or name), "content": content, **known}
    made = message.get("tool_calls") or () if role == "assistant" else ()
    if not isinstance(made, Sequence):
        raise RefusedError(f"tool_calls must be a list, not {made!s:.100}")
    calls = [_call(call, number, names) for number, call in enumerate(made)]
    read = {"role": role, "content": content, **({"tool_calls": calls} if calls else {})}
    reasoning = message.get("reasoning_content") if role == "assistant" else None
    return with_reasoning(read, reasoning if isinstance(reasoning, str) else "")


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
        id = str(call.get("id", ""))
        given = {"id": id} if POLICY_ID.fullmatch(id) else {}
        names[id] = function["name"], id if given else call_id(number)
        return {"type": "function", "function": {"name": function["name"], "arguments": arguments}, **given}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise RefusedError(f"a tool call cannot be read: {error!r}") from error


def _read_tools(tools: Any) -> tuple[Message, ...]:
    """Tools as templates take them. Raises RefusedError: one has no schema to check the policy's calls against."""
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


def completion_body(completion: Completion, created: int) -> dict[str, Any]:
    """The body of an answer."""
    message = dict(completion.message)
    finish = completion.finish_reason
    if calls := message.get("tool_calls"):
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                "id": call.get("id") or f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
            }
            for call in calls
        ]
        finish = "tool_calls" if finish == "stop" else finish
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": created,
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.sampled_tokens,
            "total_tokens": completion.prompt_tokens + completion.sampled_tokens,
        },
    }


def as_events(body: Mapping[str, Any]) -> bytes:
    """An answer as a stream of events, with the whole answer in the first event."""
    choice = body["choices"][0]
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
    piece = {"index": 0, "delta": message, "finish_reason": choice["finish_reason"]}
    event = {**body, "object": "chat.completion.chunk", "choices": [piece]}
    return f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
