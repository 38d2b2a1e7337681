"""Checks the grammars of all tasks before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.config.schema import ActorConfig
from asyncrl.errors import DataError, RefusedError
from asyncrl.grammar import KEY, read_grammar

if TYPE_CHECKING:
    from asyncrl.data.reading import TaskFile


def check_grammars(engine_kind: str, actor: ActorConfig, files: Sequence[TaskFile]) -> None:
    """Raises DataError: a task has a response_format that cannot be read, or that this run cannot serve."""
    for file in files:
        for text, row in file.extra_texts(KEY).items():
            try:
                grammar = read_grammar(text)
            except RefusedError as error:
                raise DataError(f"{file.place(row)}: extra_info.{error}") from error
            if grammar is not None and (reason := _obstacle(engine_kind, actor)):
                raise DataError(f"{file.place(row)} has an extra_info.{KEY}: {reason}")


def _obstacle(engine_kind: str, actor: ActorConfig) -> str:
    """Return the reason why this run cannot sample under grammars, or "" if it can."""
    if engine_kind == "embedded":
        return "engine.kind=embedded samples without grammars; use sglang or vllm"
    if actor.has_environments:
        return "a turn under a grammar cannot call the tools of an environment; leave it out of the data"
    if actor.tools:
        return "a turn under a grammar cannot call tools; set actor.tools=[]"
    if actor.verl_tools:
        return "a turn under a grammar cannot call tools; set actor.verl_tools=[]"
    if actor.temperature != 1:
        return f"a turn under a grammar is not trained with actor.temperature={actor.temperature:g}; use 1"
    return ""
