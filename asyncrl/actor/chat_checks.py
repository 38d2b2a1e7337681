"""What the start finds out about the model's chat template, so that no episode has to.

Each tool is tried alone, with its schema: a call of it and a result. Of the data, one row for every order of roles is
rendered: what templates refuse is an order, such as a system message first, or two users in a row.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.actor.chat import Chat
from asyncrl.actor.history import rewritings
from asyncrl.actor.template import QUESTION, result
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError, RefusedError
from asyncrl.types import Task

log = logging.getLogger(__name__)

Function = Mapping[str, Any]


def open_chat(config: TrainConfig) -> Chat:
    """The chat template of the policy. Raises ConfigError: it cannot be used."""
    from transformers import AutoTokenizer

    model = config.model
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={model.path}: its tokenizer cannot be loaded: {error}") from error
    return Chat(tokenizer, config.actor.template_kwargs)


def check_tools(chat: Chat, functions: Mapping[str, Function]) -> None:
    """Raises ConfigError: the template cannot show one of the tools, a call of it or its result."""
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


def check_tasks(chat: Chat, path: str, rows: Mapping[int, Task], functions: Mapping[str, Function]) -> None:
    """Raises ConfigError: the template refuses one of the `rows` of the file `path`, with the tools that it offers."""
    for row, task in rows.items():
        tools = [as_tool(function) for function in (task.tools or functions.values())]
        try:
            chat.prompt(task.messages, tools)
        except RefusedError as error:
            roles = ", ".join(str(message["role"]) for message in task.messages)
            raise ConfigError(
                f"{path}: row {row} has messages of the roles {roles}: {error}; change such rows, or use a model whose "
                "template takes them"
            ) from error


def as_tool(function: Function) -> Mapping[str, Any]:
    """A function object as templates take it."""
    return {"type": "function", "function": function.get("function", function)}


def report_rewritings(chat: Chat, history: str) -> Sequence[str]:
    """Log once what the template rewrites, and what `actor.history` makes of it. Returns the kinds of conversations."""
    found = rewritings(chat)
    alike: dict[tuple[str, str], list[str]] = {}
    for each in found:
        alike.setdefault((each.recorded, each.rendered), []).append(each.what)
    if found:
        consequence = {
            "sampled": "episodes go on from what was sampled, whereas a policy deployed through this template sees its "
            "rendering; actor.history=template begins a new branch instead",
            "template": "episodes begin a new branch there",
        }[history]
        log.warning(
            "the model's chat template rewrites what was said before (docs/agents.md): %s. It rewrites %s",
            consequence,
            "; ".join(
                f"{', '.join(kinds)}: recorded {recorded!r}, rendered {rendered!r}"
                for (recorded, rendered), kinds in alike.items()
            ),
        )
    return [each.what for each in found]
