"""The conversation of an episode: which tokens a request for a completion begins with. Nothing here waits or does I/O.

A request repeats the whole conversation. If it only adds messages behind a completion that was recorded, its tokens
continue those of the completion's branch, by the exact suffix of the chat template. Otherwise a new branch begins with
the whole conversation as its prompt, in which earlier completions are context.

A completion that was cut at a limit has no end of its turn. If the template renders the conversation as the tokens have
it, but for that end, the end is added as context; otherwise a new branch begins. With `as_rendered` the template's
rendering decides behind every completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.chat import Chat
from asyncrl.actor.engine.base import Generation
from asyncrl.actor.recorder import Prefix, Recorder, Reservation
from asyncrl.errors import RefusedError
from asyncrl.types import ToolCall

Message = Mapping[str, Any]


class CompletionRequest(NamedTuple):
    """A request for a completion: all messages so far and the tools, both in the form that templates take.
    `max_tokens` is the caller's own limit of the completion, if any."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    max_tokens: int | None = None


class Conversation:
    """What was requested and completed in one episode, whose tokens `recorder` has."""

    def __init__(self, recorder: Recorder, chat: Chat, as_rendered: bool = False) -> None:
        self._recorder = recorder
        self._chat = chat
        self._as_rendered = as_rendered
        self._completed: list[tuple[tuple[Message, ...], tuple[Message, ...], Prefix]] = []

    def reserve(self, request: CompletionRequest) -> Reservation:
        """Room for the completion that `request` asks for: give it to `record`, or to the recorder's `cancel`.

        Raises RefusedError: the chat template does not take the request. Raises LimitError, BusyError: see Recorder.
        """
        prefix, added = self._continuation(request)
        return self._recorder.reserve(added, prefix, request.max_tokens)

    def record(
        self,
        request: CompletionRequest,
        reservation: Reservation,
        sampled: Generation,
        answer: Message,
        calls: Sequence[ToolCall],
    ) -> None:
        """Record a completion, in which the policy made `calls`. Later requests repeat it as the message `answer`.

        Raises EngineError: see Recorder.
        """
        prefix = self._recorder.record(reservation, sampled, calls)
        self._completed.append(((*request.messages, answer), request.tools, prefix))

    def _continuation(self, request: CompletionRequest) -> tuple[Prefix | None, NDArray[np.int32]]:
        """The prefix that the request continues, if any, and the tokens that it adds."""
        for messages, tools, prefix in reversed(self._completed):
            following = request.messages[len(messages) :]
            if request.messages[: len(messages)] == messages and request.tools == tools and _is_context(following):
                added = self._chat.suffix(following, request.tools, int(prefix.tokens[-1]))
                if self._keeps(prefix, added, request):
                    return prefix, added
                break
        return None, self._chat.prompt(request.messages, request.tools)

    def _keeps(self, prefix: Prefix, added: NDArray[np.int32], request: CompletionRequest) -> bool:
        """Whether the request may continue the tokens of `prefix` with `added`."""
        ended = prefix.turn.finish_reason == "stop"
        if ended and not self._as_rendered:
            return True
        try:
            return self._chat.renders(np.concatenate([prefix.tokens, added]), request.messages, request.tools)
        except RefusedError:
            return ended


def _is_context(messages: Sequence[Message]) -> bool:
    """Whether the policy is to write behind these messages, and wrote none of them."""
    return bool(messages) and all(message["role"] != "assistant" for message in messages)
