"""Checks the model's chat template before a run and when an actor starts, so that no episode fails because of the
template.

* `check_tools` renders each tool separately: its schema, a call and a result.
* `check_tasks` renders the messages of tasks. The checks before a run give it one row for every order of roles, because
  a template may refuse an order, for example if a system message comes first.
* `rewritings` finds conversations whose history the template rewrites. An episode records the sampled tokens, with
  suffixes in between. Some templates render a conversation differently once it continues: they drop thoughts that come
  before a later question, move the list of tools, or open the policy's turn with a prompt that earlier turns in the
  rendering lack. A policy that is deployed with such a template sees other contexts than in training.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from operator import eq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.chat import NO_FORMAT, Chat
from asyncrl.chat.image_blocks import without_images
from asyncrl.chat.template import QUESTION, TOOL, Messages, answer, calling, result, with_reasoning
from asyncrl.errors import ConfigError, RefusedError
from asyncrl.types import Task

log = logging.getLogger(__name__)

Function = Mapping[str, Any]

_SYSTEM = {"role": "system", "content": "instruction"}
_AGAIN = {"role": "user", "content": "another question"}
_ANSWER = answer("answer")
_THOUGHT = "<think>\nthought\n</think>\n\n"
_ONE, _TWO = {"mark": "one"}, {"mark": "two"}

CONVERSATIONS: Mapping[str, tuple[Messages, Messages]] = {
    "a later question": ([QUESTION, _ANSWER, _AGAIN, _ANSWER], []),
    "a system message and tools": ([_SYSTEM, QUESTION, _ANSWER, _AGAIN, _ANSWER], [TOOL]),
    "text before a call": ([QUESTION, calling([_ONE], content="text"), result("15"), _ANSWER], [TOOL]),
    "several calls at once": ([QUESTION, calling([_ONE, _TWO]), result("15"), result("16"), _ANSWER], [TOOL]),
    "calls one after another": (
        [QUESTION, calling([_ONE]), result("15"), calling([_TWO]), result("16"), _ANSWER],
        [TOOL],
    ),
    "a question after a result": (
        [QUESTION, calling([_ONE]), result("15"), _ANSWER, _AGAIN, _ANSWER],
        [TOOL],
    ),
    "thoughts": ([QUESTION, answer(_THOUGHT + "answer"), _AGAIN, _ANSWER], []),
    "thoughts before a call": ([QUESTION, calling([_ONE], content=_THOUGHT), result("15"), _ANSWER], [TOOL]),
}
"""Maps the name of each conversation that `rewritings` renders to its messages and its tools."""

_CONSEQUENCES = {
    "sampled": "episodes continue from the sampled tokens, but a policy deployed with this template would see its "
    "rendering; with actor.history=template episodes begin a new branch instead",
    "template": "episodes begin a new branch where it does so",
}


def check_tools(chat: Chat, functions: Mapping[str, Function]) -> None:
    """Raises ConfigError: the template cannot show a tool, a call or a result, or shows calls in no known form."""
    for name, function in functions.items():
        shown = [as_tool(function)]
        try:
            chat.prompt([QUESTION], shown)
            chat.suffix([result("", name)], shown)
        except RefusedError as error:
            raise ConfigError(
                f"actor.tools: {name} cannot be used with model.path: {error}; leave it out, or give the tokenizer a "
                "chat template that shows tools, their calls and results"
            ) from error
    if functions and chat.format is None:
        raise ConfigError(f"actor.tools: {NO_FORMAT}, or leave actor.tools empty")


def check_tasks(chat: Chat, tasks: Mapping[str, Task], functions: Mapping[str, Function]) -> None:
    """Raises ConfigError: the template refuses a task with its tools. The keys of `tasks` are names of the tasks for
    the error message."""
    for place, task in tasks.items():
        tools = [as_tool(function) for function in (task.tools or functions.values())]
        try:
            chat.prompt(without_images(task.messages), tools)
        except RefusedError as error:
            roles = ", ".join(str(message["role"]) for message in task.messages)
            raise ConfigError(
                f"{place} has messages of the roles {roles}: {error}; change such rows, or use a model whose "
                "template takes them"
            ) from error


def rewritings(chat: Chat) -> dict[tuple[str, str], list[str]]:
    """Find the conversations of `CONVERSATIONS` that the template rewrites.

    Returns a mapping from pairs of texts to the names of conversations. A pair has the recorded and the rendered text
    around the first difference in these conversations. Conversations that the template refuses are left out.
    """
    found = defaultdict(list)
    for name, (messages, tools) in CONVERSATIONS.items():
        with suppress(RefusedError):
            if chat.format and chat.format.reasoning_apart:
                messages = [_apart(each) for each in messages]
            messages = chat.identified(messages)
            tokens = _recorded(chat, messages, tools)
            if not chat.renders(tokens, messages, tools):
                recorded, rendered = chat.text(tokens), chat.text(chat.rendered(messages, tools))
                first = [*map(eq, recorded, rendered), False].index(False)
                around = slice(max(0, first - 30), first + 30)
                found[recorded[around], rendered[around]].append(name)
    return found


def report_rewritings(chat: Chat, history: str) -> None:
    """Log the conversations that the template rewrites, and what follows from this with the value `history` of
    `actor.history`."""
    if found := rewritings(chat):
        log.warning(
            "the model's chat template rewrites the history (docs/agents.md): %s. It rewrites %s",
            _CONSEQUENCES[history],
            "; ".join(
                f"{', '.join(names)}: recorded {recorded!r}, rendered {rendered!r}"
                for (recorded, rendered), names in found.items()
            ),
        )


def as_tool(function: Function) -> Function:
    """Wrap a function object in the form that templates take."""
    return {"type": "function", "function": function.get("function", function)}


def _apart(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move the thought of a message into its own field."""
    content = message["content"].removeprefix(_THOUGHT)
    return message if content == message["content"] else with_reasoning({**message, "content": content}, "thought")


def _recorded(chat: Chat, messages: Messages, tools: Messages) -> NDArray[np.int32]:
    """The tokens of an episode in which the policy writes the assistant turns of `messages` as the template would.

    Raises RefusedError: the template does not take the messages.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    tokens = [chat.prompt(messages[: turns[0]], tools)]
    for turn, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        sampled = chat.written(messages[: turn + 1], tools)
        tokens.append(sampled)
        if turn + 1 < len(messages):
            tokens.append(chat.suffix(messages[turn + 1 : following], tools, int(sampled[-1])))
    return np.concatenate(tokens)
