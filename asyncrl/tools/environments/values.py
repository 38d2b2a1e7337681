"""Values that go into and come out of an environment's methods: the task's row for `reset`, and the results of methods.

The user's code may return any value. The functions that read a result raise an error if they refuse it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from asyncrl.chat.history import Message
from asyncrl.data.facts import ENVIRONMENT
from asyncrl.tools.results import Content, joined, read_content
from asyncrl.types import Task


def row_of(task: Task, several: bool) -> dict[str, Any]:
    """The arguments of `reset`: the fields of `extra_info`, and `prompt`, `ground_truth` and `data_source`.

    If there are `several` environments, the field that chooses one is left out.
    """
    row = {name: value for name, value in task.extra_info.items() if not (several and name == ENVIRONMENT)}
    row |= {"prompt": list(task.messages), "ground_truth": task.ground_truth, "data_source": task.data_source}
    return row


def taken(reset: Callable[..., Any], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the row that `reset` takes: all fields if it has `**kwargs`, else only its named arguments."""
    parameters = inspect.signature(reset).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}


def missing(reset: Callable[..., Any], row: Mapping[str, Any]) -> list[str]:
    """The arguments that `reset` needs and the row lacks: `reset` takes them by name, and they have no default
    value."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(reset).parameters.values()
    return [
        each.name for each in parameters if each.kind in by_name and each.default is each.empty and each.name not in row
    ]


def with_content_added(messages: Sequence[Message], content: Content) -> tuple[Message, ...]:
    """The messages with `content` at the end of the last user message, or in a new user message if there is none."""
    last = max((index for index, each in enumerate(messages) if each["role"] == "user"), default=None)
    if last is None:
        return (*messages, {"role": "user", "content": content})
    changed = {**messages[last], "content": joined(messages[last]["content"], content)}
    return (*messages[:last], changed, *messages[last + 1 :])


def shown(result: Any) -> Content:
    """The content that the policy sees: texts and images, or any other value as text. Raises the errors of
    `read_content`."""
    content = None if isinstance(result, str) else read_content(result)
    # `str(result)` may be an instance of a user's subclass of `str`.
    return str.__str__(str(result)) if content is None else content


def observation(result: Any) -> Content | None:
    """Read the result of `reset`. Raises TypeError: it is neither a text, nor a list of texts and images, nor None.
    Raises also the errors of `read_content`."""
    if isinstance(result, str):
        return shown(result)
    content = read_content(result)
    if content is None and result is not None:
        raise TypeError(f"it returned {type(result).__name__}, not a text, a list of texts and images, or None")
    return content


def call_reward(result: Any) -> float | None:
    """Read the result of `get_call_reward`. Raises the errors of `reward`."""
    return None if result is None else reward(result)


def reward(result: Any) -> float:
    """Read the result of `get_reward`. Raises TypeError: it is not a finite number; OverflowError: it is too large for
    a float."""
    if not isinstance(result, Real) or not math.isfinite(result):
        raise TypeError(f"it returned {result!r:.100}, not a finite number")
    return float(result)
