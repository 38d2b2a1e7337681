"""Reads the messages and tools of the chat-completions API into the form that templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.chat.formats.schemas import parameters_of
from asyncrl.chat.history import Message
from asyncrl.chat.template import POLICY_ID, call_id, with_reasoning
from asyncrl.errors import RefusedError
from asyncrl.text import encodable, nested_within

MAX_LEVELS = 64
"""The maximum depth to which lists and objects may be nested in a request."""

IMAGE_SCHEMES = ("data", "http", "https")
_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(messages: Sequence[Any]) -> tuple[Message, ...]:
    """Read messages of the API into the form that templates take. Results without an id answer the calls of the turn
    before them, in order. Raises RefusedError: a message is malformed or not supported."""
    names: dict[str, tuple[str, str]] = {}
    unanswered: list[tuple[str, str]] = []
    return tuple(_message(message, names, unanswered) for message in messages)


def _message(message: Any, names: dict[str, tuple[str, str]], unanswered: list[tuple[str, str]]) -> Message:
    """Read one message. `names` maps the id of each earlier call to its tool and to the id that templates take.
    `unanswered` has the id and the tool of each call of the last assistant turn that has no result yet."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise RefusedError(f"a message must have a role of {', '.join(_ROLES)}, not {message!s:.100}")
    role = "system" if message["role"] == "developer" else message["role"]
    content = _content(message.get("content"), role)
    if role == "tool":
        id = _id(message.get("tool_call_id"))
        call = next((each for each in unanswered if each[0] == id or not id), None)
        if call is not None:
            unanswered.remove(call)
        name, number = names.get(id, ("unknown", "")) if id else ("unknown" if call is None else call[1], "")
        known = {"tool_call_id": number} if number else {}
        return {"role": role, "name": str(message.get("name") or name), "content": content, **known}
    made = message.get("tool_calls") or () if role == "assistant" else ()
    if not isinstance(made, Sequence):
        raise RefusedError(f"tool_calls must be a list, not {made!s:.100}")
    calls = [_call(call, number, names) for number, call in enumerate(made)]
    if role == "assistant":
        unanswered[:] = [
            (_id(given.get("id")), call["function"]["name"]) for given, call in zip(made, calls, strict=True)
        ]
    read = {"role": role, "content": content, **({"tool_calls": calls} if calls else {})}
    reasoning = message.get("reasoning_content") or message.get("reasoning") if role == "assistant" else None
    return with_reasoning(read, reasoning if isinstance(reasoning, str) else "")


def _content(content: Any, role: str) -> str | list[dict[str, Any]]:
    """Read the content of a message. Returns a text, or blocks of which at least one is an image."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list() if all(isinstance(part, dict) for part in content):
            kinds = {str(part.get("type")) for part in content}
            if kinds <= {"text"}:
                return "".join(map(_part, content))
            if kinds <= {"text", "image_url"} and role != "assistant":
                return [_block(part) for part in content]
            where = "the policy's own turns have no images; " if kinds <= {"text", "image_url"} else ""
            raise RefusedError(
                f"parts of the types {', '.join(sorted(kinds))[:200]} cannot be recorded in a message of the role "
                f"{role}: {where}only text can, and in messages of users and tools also images (image_url)"
            )
    raise RefusedError(f"the content of a message must be a text, or a list of parts, not {content!s:.100}")


def _block(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": _part(part)}
    named = part.get("image_url")
    return image_part(named.get("url") if isinstance(named, dict) else named)


def image_part(url: Any) -> dict[str, Any]:
    """An image block with a URL. Raises RefusedError: `url` is not a data:, http or https URL."""
    if not isinstance(url, str) or url.partition(":")[0].lower() not in IMAGE_SCHEMES:
        raise RefusedError(f"an image is {url!s:.60}; it must be a data: URL, or an http or https URL")
    return {"type": "image_url", "image_url": {"url": url}}


def _part(part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if not isinstance(text, str | None):
        raise RefusedError(f"the text of a part is {text!s:.100}; it must be a text")
    return text or ""


def _call(call: Any, number: int, names: dict[str, tuple[str, str]]) -> Message:
    try:
        function = call["function"]
        if not isinstance(function["name"], str):
            raise TypeError("its name must be a text")
        arguments = function.get("arguments") or "{}"
        arguments = encodable(json.loads(arguments)) if isinstance(arguments, str) else arguments
        if not nested_within(arguments, MAX_LEVELS):
            raise ValueError(f"its arguments are nested in more than {MAX_LEVELS} levels")
        id = _id(call.get("id"))
        given = {"id": id} if POLICY_ID.fullmatch(id) else {}
        names[id] = function["name"], id if given else call_id(number)
        return {"type": "function", "function": {"name": function["name"], "arguments": arguments}, **given}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise RefusedError(f"a tool call cannot be read: {error!r}") from error


def _id(given: Any) -> str:
    return "" if given is None else str(given)


def read_tools(tools: Any) -> tuple[Message, ...]:
    """Read tools into the form that templates take.

    Raises RefusedError: a tool has no schema against which the policy's calls can be checked.
    """
    offered = tools if isinstance(tools, list) else [tools]
    for tool in offered:
        match tool:
            case {"function": {"name": str()} as function} if _has_object_schema(function):
                continue
        raise RefusedError(
            "a tool must be {type: function, function: {name, description, parameters}}, with a JSON schema for "
            f"parameters; got {tool!s:.200}"
        )
    return tuple(offered)


def _has_object_schema(function: Mapping[str, Any]) -> bool:
    """True if calls can be checked against the schema of the function's arguments."""
    if not isinstance(function.get("parameters") or {}, dict):
        return False
    schema = parameters_of(function)
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    return isinstance(properties, dict) and _are_texts(required) and all(map(_is_schema, properties.values()))


def _is_schema(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    kinds, allowed = schema.get("type") or [], schema.get("enum") or []
    choices = [schema.get(key) or [] for key in ("anyOf", "oneOf")]
    return (
        (isinstance(kinds, str) or _are_texts(kinds))
        and isinstance(allowed, list)
        and all(isinstance(each, list) and all(map(_is_schema, each)) for each in choices)
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
