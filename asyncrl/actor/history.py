"""Whether the chat template rewrites what was said: found by rendering short conversations at the start.

What is recorded of an episode is what was sampled, with suffixes in between. Some templates render a conversation
differently once it goes on: they drop thoughts before a later question, move the list of tools, or have a generation
prompt that is not in the history. Whoever deploys the policy through such a template shows it other contexts than those
that it was trained in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.chat import Chat
from asyncrl.actor.template import QUESTION, TOOL, Messages, answer, calling, result
from asyncrl.errors import RefusedError

_SYSTEM = {"role": "system", "content": "instruction"}
_AGAIN = {"role": "user", "content": "another question"}
_ANSWER = answer("answer")
_THOUGHT = "<think>\nthought\n</think>\n\n"
_ONE, _TWO = {"mark": "one"}, {"mark": "two"}

_Conversation = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]

CONVERSATIONS: Mapping[str, _Conversation] = {
    "a later question": ([QUESTION, _ANSWER, _AGAIN, _ANSWER], []),
    "a system message and tools": ([_SYSTEM, QUESTION, _ANSWER, _AGAIN, _ANSWER], [TOOL]),
    "text before a call": ([QUESTION, calling([_ONE], content="text"), result("15"), _ANSWER], [TOOL]),
    "several calls at once": ([QUESTION, calling([_ONE, _TWO]), result("15"), result("16"), _ANSWER], [TOOL]),
    "calls one after another": (
        [QUESTION, calling([_ONE]), result("15"), calling([_TWO]), result("16"), _ANSWER],
        [TOOL],
    ),
    "a question behind a result": (
        [QUESTION, calling([_ONE]), result("15"), _ANSWER, _AGAIN, _ANSWER],
        [TOOL],
    ),
    "thoughts": ([QUESTION, answer(_THOUGHT + "answer"), _AGAIN, _ANSWER], []),
    "thoughts before a call": ([QUESTION, calling([_ONE], content=_THOUGHT), result("15"), _ANSWER], [TOOL]),
}


@dataclass(frozen=True, slots=True)
class Rewriting:
    """A kind of conversation that the template renders in another way than it is recorded, and both where they part."""

    what: str
    recorded: str
    rendered: str


def rewritings(chat: Chat) -> list[Rewriting]:
    """The conversations of `CONVERSATIONS` that the template rewrites; those that it refuses are left out."""
    found = []
    for what, (messages, tools) in CONVERSATIONS.items():
        try:
            tokens = recorded(chat, messages, tools)
            if not chat.renders(tokens, messages, tools):
                found.append(Rewriting(what, *_parting(chat.text(tokens), chat.text(chat.rendered(messages, tools)))))
        except RefusedError:
            continue
    return found


def recorded(chat: Chat, messages: Messages, tools: Messages) -> NDArray[np.int32]:
    """The tokens of an episode in which the policy wrote the assistant turns of `messages` as the template would.

    Raises RefusedError: the template does not take the messages.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    tokens = [chat.prompt(messages[: turns[0]], tools)]
    for turn, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        said = chat.encode(chat.written(messages[: turn + 1], tools))
        tokens.append(said)
        if turn + 1 < len(messages):
            tokens.append(chat.suffix(messages[turn + 1 : following], tools, int(said[-1])))
    return np.concatenate(tokens)


def _parting(recorded: str, rendered: str) -> tuple[str, str]:
    """What each says around the point at which they part."""
    shorter = min(len(recorded), len(rendered))
    parting = next((index for index in range(shorter) if recorded[index] != rendered[index]), shorter)
    start = max(0, parting - 30)
    return recorded[start : parting + 30], rendered[start : parting + 30]
