"""OpenAI's chat completions: reads requests, and writes answers, whole or as streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.agents.chat_api.api import (
    MAX_COUNT,
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
    read_stop,
    refuse_fields,
)
from asyncrl.chat.chat import Chat
from asyncrl.chat.history import Message
from asyncrl.chat.messages import read_messages, read_tools
from asyncrl.episode.completions import Completion
from asyncrl.episode.recorder import CompletionRequest
from asyncrl.errors import RefusedError
from asyncrl.grammar import FORMS, KEY, read_grammar

_GRAMMARS_OF_SERVERS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice"),
    *("regex", "ebnf", "json_schema", "structural_tag"),
)
"""The fields by which requests to vLLM and SGLang servers give a grammar."""


class ChatCompletions(Api):
    """The protocol `/chat/completions`."""

    path = "chat/completions"

    def read(self, body: Mapping[str, Any], conversations: Conversations) -> PolicyRequest:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RefusedError("a request must be an object with a list of messages")
        refuse_fields(body, {"logit_bias": "it would change what the policy samples; leave it out"})
        for name in _GRAMMARS_OF_SERVERS:
            if body.get(name):
                raise RefusedError(f"{name}={body[name]!r:.200}: give the grammar as {KEY}: {FORMS}")
        tools, wants_call = _offered(read_tools(body.get("tools") or []), body.get("tool_choice"))
        completion = CompletionRequest(
            read_messages(messages),
            tools,
            read_limit(body, "max_completion_tokens", "max_tokens"),
            read_grammar(body.get(KEY)),
            read_stop(body.get("stop"), "stop"),
            _alternatives(body),
        )
        options = {
            "logprobs": read_flag(body, "logprobs"),
            "token_ids": read_flag(body, "return_token_ids"),
            "usage": _wants_usage(body.get("stream_options")),
        }
        stream = read_flag(body, "stream")
        return PolicyRequest(completion, stream, _read_count(body), wants_call, overridden(body), options)

    def answer(
        self,
        request: PolicyRequest,
        completions: Sequence[Completion],
        chat: Chat,
        created: int,
        conversations: Conversations,
    ) -> dict[str, Any]:
        prompt, sampled = len(completions[0].prompt), sum(len(each.sampled.tokens) for each in completions)
        ids = {"prompt_token_ids": completions[0].prompt.tolist()} if request.options["token_ids"] else {}
        return {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": created,
            "model": "policy",
            "choices": [_choice(index, each, request, chat) for index, each in enumerate(completions)],
            "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
            **ids,
        }

    def events(self, request: PolicyRequest, answer: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the events of each choice. The first event of a choice has the log-probs and token ids of the whole
        choice."""
        common = {**answer, "object": "chat.completion.chunk"}
        usage, ids = common.pop("usage"), common.pop("prompt_token_ids", None)
        wanted = request.options["usage"]
        empty = {"usage": None} if wanted else {}
        first = {} if ids is None else {"prompt_token_ids": ids}
        for choice in answer["choices"]:
            of_whole = {key: choice[key] for key in ("logprobs", "token_ids") if key in choice}
            for delta in _deltas(choice["message"]):
                piece = {"index": choice["index"], "delta": delta, **of_whole, "finish_reason": None}
                yield event({**common, **first, "choices": [piece], **empty})
                first, of_whole = {}, {"logprobs": None}
            last = {"index": choice["index"], "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
            yield event({**common, "choices": [last], **empty})
        if wanted:
            yield event({**common, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": code, "param": None, "code": code}}


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
        case {"type": "function", "function": {"name": name}}:
            return only_named(tools, [name]), True
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(named)}}:
            functions = [each.get("function") if isinstance(each, dict) else None for each in named]
            names = [each.get("name") if isinstance(each, dict) else None for each in functions]
            return only_named(tools, names), mode == "required"
    raise RefusedError(f"tool_choice is {choice!s:.100}; use auto, none, required, or the name of a function")


def _read_count(body: Mapping[str, Any]) -> int:
    count = 1 if body.get("n") is None else body["n"]
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_COUNT:
        raise RefusedError(f"n is {count!s:.100}; it must be from 1 to {MAX_COUNT}")
    return count


def _alternatives(body: Mapping[str, Any]) -> int:
    most = read_alternatives(body)
    if most and not read_flag(body, "logprobs"):
        raise RefusedError(f"top_logprobs={most} needs logprobs=true")
    return most


def _wants_usage(options: Any) -> bool:
    if options is not None and not isinstance(options, dict):
        raise RefusedError(f"stream_options is {options!s:.100}; it must be an object")
    return bool(options and options.get("include_usage"))


def _choice(index: int, completion: Completion, request: PolicyRequest, chat: Chat) -> dict[str, Any]:
    message, finish = dict(completion.message), completion.finish_reason
    if calls := calls_of(completion):
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
        finish = "tool_calls" if finish == "stop" else finish
    logprobs = {"content": logprobs_of(completion, chat), "refusal": None} if request.options["logprobs"] else None
    ids = {"token_ids": completion.sampled.tokens.tolist()} if request.options["token_ids"] else {}
    stop = {"stop_reason": completion.stop} if completion.stop else {}
    return {"index": index, "message": message, "finish_reason": finish, "logprobs": logprobs, **ids, **stop}


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the deltas of a stream that add up to the message."""
    yield {"role": "assistant", "content": ""}
    for key in ("reasoning_content", "content"):
        for piece in pieces(message.get(key) or ""):
            yield {key: piece}
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        yield {"tool_calls": [{**call, "index": index, "function": {**function, "arguments": ""}}]}
        for piece in pieces(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
