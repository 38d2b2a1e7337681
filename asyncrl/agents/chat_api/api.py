"""The interface of a protocol by which agents reach the policy, and functions that read the settings that several
protocols have.

A request that would change the policy's distribution, or that cannot be recorded as tokens, is refused with the reason.
A grammar changes the distribution, too, but its effect is recorded (docs/engines.md). The sampling parameters come from
the episode's ticket, the replay's permission to play the episode. If a request has other values, they have no effect,
and the request is answered and counted.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.chat import Chat
from asyncrl.chat.history import Message
from asyncrl.episode.completions import Completion
from asyncrl.episode.recorder import CompletionRequest
from asyncrl.errors import RefusedError

MAX_COUNT = 128
MAX_STOPS = 16
MAX_ALTERNATIVES = 5
MOST_PIECES = 64
"""The maximum number of pieces, one event each, into which a stream divides one text."""

Conversations = dict[str, tuple[Message, ...]]
"""Maps the id of each earlier answer in an episode to the conversation that ends with this answer. Requests may name
the ids."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "seed": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "parallel_tool_calls": (True,),
}
"""Maps each setting of sampling that has no effect here to its neutral values. A request with another value is
counted."""

_WORDS = re.compile(r"\s*\S+|\s+\Z")


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """A request for `count` completions.

    - `wants_call`: the agent wants a tool call. The policy may still answer without one
    - `overridden`: the names of the request's settings that have no effect
    - `options`: settings for the answer that only the request's protocol has
    """

    completion: CompletionRequest
    stream: bool = False
    count: int = 1
    wants_call: bool = False
    overridden: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


class Api(ABC):
    """A protocol by which agents reach the policy, at `path` below the address of their episode."""

    path: ClassVar[str]

    @abstractmethod
    def read(self, body: Mapping[str, Any], conversations: Conversations) -> PolicyRequest:
        """Read the request from the decoded body of an HTTP request. Raises RefusedError: the body is malformed, or
        asks for something that is not supported."""

    @abstractmethod
    def answer(
        self,
        request: PolicyRequest,
        completions: Sequence[Completion],
        chat: Chat,
        created: int,
        conversations: Conversations,
    ) -> dict[str, Any]:
        """Make the body of the answer. If later requests may name the answer, its conversation is added to
        `conversations`.

        `created` is the time in seconds.
        """

    @abstractmethod
    def events(self, request: PolicyRequest, answer: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the events of a stream that carry the answer."""

    @abstractmethod
    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        """The body of an error answer with an HTTP `status` of 400 or more."""


def new_id(prefix: str) -> str:
    """Make a unique id with the prefix that its protocol uses."""
    return f"{prefix}{uuid.uuid4().hex}"


def read_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """Read the token limit of a completion from the first of the fields `names` that the body has. Returns None if it
    has none of these fields. Raises RefusedError: the limit is not a positive integer."""
    for name in names:
        limit = body.get(name)
        if limit is not None:
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
                raise RefusedError(f"{name} is {limit!s:.100}; it must be a positive integer")
            return limit
    return None


def read_stop(stop: Any, name: str) -> tuple[str, ...]:
    """Read `stop`, the value of a request's field `name`: the texts at which a completion ends. Raises RefusedError:
    `stop` is malformed."""
    texts = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(each, str) for each in texts):
        raise RefusedError(f"{name} is {stop!s:.100}; it must be a text, or a list of up to {MAX_STOPS} texts")
    return tuple(each for each in texts if each)


def read_alternatives(body: Mapping[str, Any]) -> int:
    """Read `top_logprobs`: how many of the most likely tokens at each position the answer must list. Raises
    RefusedError: the number is invalid."""
    most = body.get("top_logprobs") or 0
    if not isinstance(most, int) or isinstance(most, bool) or not 0 <= most <= MAX_ALTERNATIVES:
        raise RefusedError(f"top_logprobs is {most!s:.100}; it must be from 0 to {MAX_ALTERNATIVES}")
    return most


def overridden(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the settings in a body that have no effect, although their values are not neutral."""
    return tuple(name for name, same in _NEUTRAL.items() if body.get(name) is not None and body[name] not in same)


def only_named(tools: tuple[Message, ...], names: Sequence[Any]) -> tuple[Message, ...]:
    """The tools with these names. Raises RefusedError: one of the names is not the name of a tool."""
    known = {tool["function"]["name"] for tool in tools}
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise RefusedError(f"tool_choice names {name!s:.100}, which is not among the tools")
    return tuple(tool for tool in tools if tool["function"]["name"] in names)


def refuse_fields(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raises RefusedError: the body has a field that must be refused. `reasons` maps the names of such fields to the
    reasons."""
    for name, reason in reasons.items():
        if body.get(name):
            raise RefusedError(f"{name}: {reason}")


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """Read a setting that is true or false. Raises RefusedError: it is something else."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RefusedError(f"{name} is {value!s:.100}; it must be true or false")
    return bool(value)


def calls_of(completion: Completion) -> list[dict[str, Any]]:
    """The calls of a completion in the form of the chat-completions API."""
    return [
        {
            "id": call.get("id") or new_id("call_"),
            "type": "function",
            "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
        }
        for call in completion.message.get("tool_calls", ())
    ]


def pieces(text: str) -> list[str]:
    """Cut a text into at most MOST_PIECES pieces of whole words, for a stream."""
    words = _WORDS.findall(text)
    size = -(-len(words) // MOST_PIECES) or 1
    return ["".join(words[start : start + size]) for start in range(0, len(words), size)]


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Write a server-sent event with `data`, and with a name unless `name` is empty."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def logprobs_of(completion: Completion, chat: Chat) -> list[dict[str, Any]]:
    """The log-probs of all sampled tokens, in the form of OpenAI's protocols."""
    sampled = completion.sampled
    tokens = _as_tokens(sampled.tokens, sampled.logprobs, chat)
    if sampled.alternatives is None:
        return [{**token, "top_logprobs": []} for token in tokens]
    others = zip(tokens, sampled.alternatives.tokens, sampled.alternatives.logprobs, strict=True)
    return [{**token, "top_logprobs": _as_tokens(likely, known, chat)} for token, likely, known in others]


def _as_tokens(tokens: NDArray[np.int32], logprobs: NDArray[np.float32], chat: Chat) -> list[dict[str, Any]]:
    return [_token(int(token), float(logprob), chat) for token, logprob in zip(tokens, logprobs, strict=True)]


def _token(token: int, logprob: float, chat: Chat) -> dict[str, Any]:
    # If a token has only a part of a character, its text is U+FFFD, and its bytes are unknown.
    text = chat.piece(token)
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
