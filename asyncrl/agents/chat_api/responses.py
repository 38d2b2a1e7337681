"""OpenAI's Responses: reads requests, and writes answers, whole or as streams.

The items of responses and inputs become messages of the chat-completions API. The reasoning, the message and the calls
of one turn are separate items in this protocol. Together they become one message.

A request may repeat the whole conversation, or name the response that it continues. For this, responses are stored
until the episode ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.agents.chat_api.api import (
    Api,
    Conversations,
    PolicyRequest,
    calls_of,
    event,
    logprobs_of,
    new_id,
    only_named,
    overridden,
    pieces,
    read_alternatives,
    read_flag,
    read_limit,
    refuse_fields,
)
from asyncrl.chat.chat import Chat
from asyncrl.chat.history import Message
from asyncrl.chat.messages import image_part, read_messages, read_tools
from asyncrl.episode.completions import Completion
from asyncrl.episode.recorder import CompletionRequest
from asyncrl.errors import RefusedError
from asyncrl.grammar import read_grammar

_LOGPROBS = "message.output_text.logprobs"
_UNSUPPORTED = {
    "background": "answers are not made in the background; leave it out",
    "conversation": "conversations are not kept; use previous_response_id, or repeat the input",
    "prompt": "there are no stored prompts; write the input",
}
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


class Responses(Api):
    """The protocol `/responses`."""

    path = "responses"

    def read(self, body: Mapping[str, Any], conversations: Conversations) -> PolicyRequest:
        refuse_fields(body, _UNSUPPORTED)
        items = _items(body.get("input"))
        previous = body.get("previous_response_id")
        if previous is not None and (not isinstance(previous, str) or previous not in conversations):
            raise RefusedError(f"previous_response_id is {previous!s:.100}, which this episode has not stored")
        earlier = list(conversations[previous]) if previous else []
        written = known = [*earlier, *_as_messages(items)]
        if instructions := body.get("instructions"):
            written = [{"role": "system", "content": _text(instructions, "instructions")}, *written]
        tools, wants_call = _offered(_tools(body.get("tools") or []), body.get("tool_choice"))
        include = body.get("include")
        logprobs = isinstance(include, list) and _LOGPROBS in include
        completion = CompletionRequest(
            read_messages(written),
            tools,
            read_limit(body, "max_output_tokens"),
            read_grammar(_form(body.get("text"))),
            alternatives=read_alternatives(body) if logprobs else 0,
        )
        store = body.get("store")
        options = {
            "logprobs": logprobs,
            # The conversation is stored without the instructions, because they apply to one response only.
            "written": known if store is None or store else None,
            "echo": {
                "instructions": instructions or None,
                "previous_response_id": previous,
                "tools": body.get("tools") or [],
                "tool_choice": body.get("tool_choice") or "auto",
                "parallel_tool_calls": True,
                "max_output_tokens": body.get("max_output_tokens"),
                "metadata": body.get("metadata") or {},
                "store": store is None or bool(store),
                "text": body.get("text") or {"format": {"type": "text"}},
            },
        }
        stream = read_flag(body, "stream")
        return PolicyRequest(completion, stream, 1, wants_call, overridden(body), options)

    def answer(
        self,
        request: PolicyRequest,
        completions: Sequence[Completion],
        chat: Chat,
        created: int,
        conversations: Conversations,
    ) -> dict[str, Any]:
        [completion] = completions
        id, prompt, sampled = new_id("resp_"), len(completion.prompt), len(completion.sampled.tokens)
        output = _output(completion, logprobs_of(completion, chat) if request.options["logprobs"] else [])
        if (written := request.options["written"]) is not None:
            conversations[id] = (*_sharing_images(written, conversations), *_as_messages(output))
        cut = completion.finish_reason == "length"
        return {
            "id": id,
            "object": "response",
            "created_at": created,
            "completed_at": created,
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": "policy",
            "output": output,
            "temperature": None,
            "top_p": None,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
            **request.options["echo"],
        }

    def events(self, request: PolicyRequest, answer: Mapping[str, Any]) -> Iterator[bytes]:
        begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        parts: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for index, item in enumerate(answer["output"]):
            at = {"output_index": index}
            parts.append(("response.output_item.added", {**at, "item": _begun(item)}))
            at["item_id"] = item["id"]
            parts += [(name, {**at, **data}) for name, data in _item_events(item)]
            parts.append(("response.output_item.done", {"output_index": index, "item": item}))
        parts.append((f"response.{answer['status']}", {"response": answer}))
        for number, (name, data) in enumerate(parts):
            yield event({"type": name, "sequence_number": number, **data}, name)

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": code, "param": None, "code": code}}


def _items(given: Any) -> list[dict[str, Any]]:
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items or not all(isinstance(each, dict) for each in items):
        raise RefusedError("a request must have a text, or a list of items, as its input")
    return items


def _as_messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert items to messages of the chat-completions API. Raises RefusedError: an item cannot become tokens."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        match kind:
            case "message" if item.get("role") == "assistant":
                text = _text(item.get("content"), "content")
                if last is None or "content" in last or "tool_calls" in last:
                    messages.append(last := {"role": "assistant"})
                last["content"] = text
            case "message":
                messages.append({"role": item.get("role"), "content": _content(item.get("content"), "content")})
            case "reasoning":
                text = _text(item.get("content") or item.get("summary") or "", "reasoning")
                messages.append({"role": "assistant", "reasoning_content": text})
            case "function_call":
                if last is None:
                    messages.append(last := {"role": "assistant"})
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                last.setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
            case "function_call_output":
                content = _content(item.get("output"), "output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case _:
                raise RefusedError(
                    f"an input item of type {kind!s:.100} cannot be recorded; use message, reasoning, function_call "
                    "and function_call_output"
                )
    return messages


def _text(content: Any, name: str) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list() if all(isinstance(part, dict) for part in content):
            for part in content:
                if part.get("type") not in _TEXTS:
                    raise RefusedError(
                        f"a part of type {part.get('type')!s:.100} cannot be recorded; text and images can"
                    )
            return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)
    raise RefusedError(f"{name} must be a text, or a list of parts")


def _content(content: Any, name: str) -> Any:
    """Convert the content to a text, or to a list of parts of the chat-completions API if it has an image."""
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return _text(content, name)
    return [_image(part) if _is_image(part) else {"type": "text", "text": _text([part], name)} for part in content]


def _sharing_images(messages: Sequence[Message], conversations: Conversations) -> list[Message]:
    """Return the messages. An image that is already in `conversations` is taken from there, so that each image is in
    memory only once."""
    # Clients repeat all images in each request. Without sharing, each stored response would have a copy of them.
    known = {url: url for messages in conversations.values() for url in _image_urls(messages)}

    def shared(part: dict[str, Any]) -> dict[str, Any]:
        url = part["image_url"]["url"] if part.get("type") == "image_url" else None
        return {**part, "image_url": {"url": known.setdefault(url, url)}} if url else part

    return [
        {**message, "content": [shared(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _image_urls(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part["image_url"]["url"] for part in content if part.get("type") == "image_url")


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _image(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("file_id"):
        raise RefusedError("files are not stored, so an input_image cannot have a file_id; give its image_url")
    return image_part(part.get("image_url"))


def _tools(tools: Any) -> tuple[Message, ...]:
    written = []
    for tool in tools if isinstance(tools, list) else [tools]:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise RefusedError(f"a tool of type {kind!s:.100} cannot be offered to the policy; only functions can")
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        written.append({"type": "function", "function": function})
    return read_tools(written)


def _offered(tools: tuple[Message, ...], choice: Any) -> tuple[tuple[Message, ...], bool]:
    """Return the tools that `choice`, a request's `tool_choice`, permits, and true if it requires a call. Raises
    RefusedError: `choice` is malformed."""
    match choice:
        case None | "auto":
            return tools, False
        case "none":
            return (), False
        case "required":
            return tools, True
        case {"type": "function", "name": name}:
            return only_named(tools, [name]), True
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(named)}:
            names = [each.get("name") if isinstance(each, dict) else None for each in named]
            return only_named(tools, names), mode == "required"
    raise RefusedError(f"tool_choice is {choice!s:.100}; use auto, none, required, or the name of a function")


def _form(text: Any) -> Any:
    """The format in a request's field `text`, as a `response_format` of chat completions."""
    if text is not None and not isinstance(text, dict):
        raise RefusedError(f"text is {text!s:.100}; it must be an object")
    match (text or {}).get("format"):
        case {"type": "json_schema", "schema": schema, **rest}:
            return {"type": "json_schema", "json_schema": {"name": rest.get("name"), "schema": schema}}
        case form:
            return form


def _output(completion: Completion, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make the items of a completion."""
    message = completion.message
    status = "incomplete" if completion.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"id": new_id("rs_"), "type": "reasoning", "summary": [], "content": content, "status": status})
    calls = calls_of(completion)
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": logprobs}
        role = {"type": "message", "role": "assistant"}
        items.append({"id": new_id("msg_"), **role, "status": status, "content": [part]})
    items += (
        {"id": new_id("fc_"), "type": "function_call", "call_id": each["id"], **each["function"], "status": status}
        for each in calls
    )
    return items


def _begun(item: Mapping[str, Any]) -> dict[str, Any]:
    """The item with an empty text, which its stream sends first."""
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, **empty, "status": "in_progress"}


def _item_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events between the beginning and the end of an item."""
    if item["type"] == "function_call":
        for piece in pieces(item["arguments"]):
            yield "response.function_call_arguments.delta", {"delta": piece}
        whole = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", whole
        return
    [part] = item["content"]
    name = f"response.{part['type']}"
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    none: dict[str, list[Any]] = {key: [] for key in logprobs}
    at = {"content_index": 0}
    yield "response.content_part.added", {**at, "part": {**part, "text": "", **none}}
    for piece in pieces(part["text"]):
        yield f"{name}.delta", {**at, "delta": piece, **none}
    yield f"{name}.done", {**at, "text": part["text"], **logprobs}
    yield "response.content_part.done", {**at, "part": part}
