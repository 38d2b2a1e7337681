"""Anthropic's Messages: reads requests, and writes answers, whole or as streams.

The blocks of a conversation become messages of the chat-completions API. In Anthropic's protocol, tool results are
blocks of a user message. Each result becomes a separate message, before the rest of the user message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.agents.chat_api.api import (
    Api,
    Conversations,
    PolicyRequest,
    calls_of,
    event,
    new_id,
    only_named,
    overridden,
    pieces,
    read_flag,
    read_limit,
    read_stop,
    refuse_fields,
)
from asyncrl.chat.chat import Chat
from asyncrl.chat.history import Message
from asyncrl.chat.messages import image_part, read_messages, read_tools
from asyncrl.episode.completions import Completion
from asyncrl.episode.recorder import CompletionRequest
from asyncrl.errors import RefusedError
from asyncrl.grammar import read_grammar

_UNSUPPORTED = {
    "mcp_servers": "the policy cannot reach servers; offer their tools as functions",
    "container": "containers are not supported; offer tools as functions",
}
_ERRORS = {401: "authentication_error", 429: "rate_limit_error", 503: "api_error"}
_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class AnthropicMessages(Api):
    """The protocol `/messages`."""

    path = "messages"

    def read(self, body: Mapping[str, Any], conversations: Conversations) -> PolicyRequest:
        refuse_fields(body, _UNSUPPORTED)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RefusedError("a request must be an object with a list of messages")
        written = [each for message in messages for each in _as_messages(message)]
        if system := body.get("system"):
            written = [{"role": "system", "content": _text(system)}, *written]
        choice = body.get("tool_choice")
        tools, wants_call = _offered(_tools(body.get("tools") or []), choice)
        completion = CompletionRequest(
            read_messages(written),
            tools,
            read_limit(body, "max_tokens"),
            read_grammar(_form(body)),
            read_stop(body.get("stop_sequences"), "stop_sequences"),
        )
        thinking = body.get("thinking")
        thinks = isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive")
        stream = read_flag(body, "stream")
        ignored = overridden(body)
        if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
            ignored += ("tool_choice.disable_parallel_tool_use",)
        return PolicyRequest(completion, stream, 1, wants_call, ignored, {"thinks": thinks})

    def answer(
        self,
        request: PolicyRequest,
        completions: Sequence[Completion],
        chat: Chat,
        created: int,
        conversations: Conversations,
    ) -> dict[str, Any]:
        [completion] = completions
        message, calls = completion.message, calls_of(completion)
        content: list[dict[str, Any]] = []
        if request.options["thinks"] and (thought := message.get("reasoning_content")):
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if message["content"] or not calls:
            content.append({"type": "text", "text": message["content"]})
        for call in calls:
            function = call["function"]
            arguments = json.loads(function["arguments"])
            content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        reason = _REASONS[completion.finish_reason]
        if calls and reason == "end_turn":
            # Agents run the calls only if the reason is `tool_use`. A turn with calls gets this reason even if a stop
            # text ended it.
            reason = "tool_use"
        elif completion.stop:
            reason = "stop_sequence"
        return {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": "policy",
            "content": content,
            "stop_reason": reason,
            "stop_sequence": completion.stop if reason == "stop_sequence" else None,
            "usage": {"input_tokens": len(completion.prompt), "output_tokens": len(completion.sampled.tokens)},
        }

    def events(self, request: PolicyRequest, answer: Mapping[str, Any]) -> Iterator[bytes]:
        usage = {**answer["usage"], "output_tokens": 0}
        begun = {**answer, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", {"message": begun})
        for index, block in enumerate(answer["content"]):
            empty, deltas = _block(block)
            yield _event("content_block_start", {"index": index, "content_block": empty})
            for delta in deltas:
                yield _event("content_block_delta", {"index": index, "delta": delta})
            yield _event("content_block_stop", {"index": index})
        ended = {key: answer[key] for key in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", {"delta": ended, "usage": answer["usage"]})
        yield _event("message_stop", {})

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        kind = _ERRORS.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


def _as_messages(message: Any) -> list[dict[str, Any]]:
    """Convert a message to messages of the chat-completions API. Raises RefusedError: the message is malformed, or has
    a block that cannot become tokens."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise RefusedError(f"a message must have a role of user, assistant or system, not {message!s:.100}")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(each, dict) for each in blocks):
        raise RefusedError(f"the content of a message must be a text, or a list of blocks, not {content!s:.100}")
    return [_as_turn(blocks)] if role == "assistant" else _as_user(role, blocks)


def _as_turn(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block.get("type"):
            case "text":
                texts.append(str(block.get("text") or ""))
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass  # Encrypted thoughts. A turn that a request repeats is recognised without its thoughts.
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "function": function})
            case kind:
                raise _unrecordable(kind)
    with_calls = {"tool_calls": calls} if calls else {}
    return {"role": "assistant", "content": "".join(texts), "reasoning_content": "".join(thoughts), **with_calls}


def _as_user(role: str, blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    results = [each for each in blocks if each.get("type") == "tool_result"]
    others = [each for each in blocks if each.get("type") != "tool_result"]
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": each.get("tool_use_id"), "content": _content(each.get("content"))}
        for each in results
    ]
    return [*messages, {"role": role, "content": _content(others)}] if others or not results else messages


def _text(content: Any) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list() if all(isinstance(block, dict) for block in content):
            for block in content:
                if block.get("type") != "text":
                    raise _unrecordable(block.get("type"))
            return "".join(str(block.get("text") or "") for block in content)
    raise RefusedError(f"content must be a text, or a list of blocks, not {content!s:.100}")


def _content(content: Any) -> Any:
    """Convert the content to a text, or to a list of parts of the chat-completions API if it has an image."""
    if not isinstance(content, list) or not any(_is_image(block) for block in content):
        return _text(content)
    return [_image(block) if _is_image(block) else {"type": "text", "text": _text([block])} for block in content]


def _is_image(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _image(block: Mapping[str, Any]) -> dict[str, Any]:
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return image_part(f"data:{kind};base64,{data}")
        case {"type": "url", "url": url}:
            return image_part(url)
    raise RefusedError("the source of an image must be of type base64, with media_type and data, or url, with url")


def _unrecordable(kind: Any) -> RefusedError:
    return RefusedError(f"a block of type {kind!s:.100} cannot be recorded; text, images and calls of tools can")


def _tools(tools: Any) -> tuple[Message, ...]:
    written = []
    for tool in tools if isinstance(tools, list) else [tools]:
        kind = (tool.get("type") or "custom") if isinstance(tool, dict) else None
        if kind != "custom":
            raise RefusedError(f"a tool of type {kind!s:.100} cannot be offered to the policy; only custom tools can")
        described = {"description": tool["description"]} if tool.get("description") else {}
        function = {"name": tool.get("name"), **described, "parameters": tool.get("input_schema")}
        written.append({"type": "function", "function": function})
    return read_tools(written)


def _offered(tools: tuple[Message, ...], choice: Any) -> tuple[tuple[Message, ...], bool]:
    match choice:
        case None | {"type": "auto"}:
            return tools, False
        case {"type": "none"}:
            return (), False
        case {"type": "any"}:
            return tools, True
        case {"type": "tool", "name": name}:
            return only_named(tools, [name]), True
    raise RefusedError(f"tool_choice is {choice!s:.100}; its type must be auto, any, tool or none")


def _form(body: Mapping[str, Any]) -> Any:
    """The requested format of the answer, as a `response_format` of chat completions. Raises RefusedError:
    `output_config` is malformed."""
    config = body.get("output_config")
    if not isinstance(config, dict | None):
        raise RefusedError(f"output_config is {config!s:.100}; it must be an object")
    form = body.get("output_format") or (config or {}).get("format")
    match form:
        case {"type": "json_schema", "schema": schema}:
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return form


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return event({"type": name, **data}, name)


def _block(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the block with an empty text, which its stream sends first, and the deltas that add the text."""
    match block["type"]:
        case "tool_use":
            text = json.dumps(block["input"])
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": each} for each in pieces(text)]
        case "thinking":
            deltas = [{"type": "thinking_delta", "thinking": each} for each in pieces(block["thinking"])]
            return {**block, "thinking": ""}, [*deltas, {"type": "signature_delta", "signature": ""}]
    return {**block, "text": ""}, [{"type": "text_delta", "text": each} for each in pieces(block["text"])]
