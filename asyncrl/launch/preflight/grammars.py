"""The start reads the grammars of all tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.config.schema import TrainConfig
from asyncrl.errors import DataError, RefusedError
from asyncrl.grammar import KEY, read_grammar

if TYPE_CHECKING:
    from asyncrl.data.reading import TaskFile


def check_grammars(config: TrainConfig, files: Sequence[TaskFile]) -> None:
    """Raises DataError: a task has a response_format that cannot be read, or that this run cannot serve."""
    for file in files:
        for text, row in file.extra_texts(KEY).items():
            try:
                grammar = read_grammar(text)
            except RefusedError as error:
                raise DataError(f"{file.place(row)}: extra_info.{error}") from error
            if grammar is not None and (reason := _obstacle(config)):
                raise DataError(f"{file.place(row)} has an extra_info.{KEY}: {reason}")


def _obstacle(config: TrainConfig) -> str:
    """Why this run cannot sample under grammars; "" if it can."""
    if config.engine.kind == "embedded":
        return "engine.kind=embedded samples without grammars; use sglang or vllm"
    if config.actor.has_environments:
        return "a turn under a grammar cannot call the tools of an environment; leave it out of the data"
    if config.actor.tools:
        return "a turn under a grammar cannot call tools; set actor.tools=[]"
    if config.actor.temperature != 1:
        return f"with actor.temperature={config.actor.temperature:g} none of its tokens would be trained; use 1"
    return ""
