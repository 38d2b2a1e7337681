"""Loads the classes of `actor.environment` and `actor.environments`, and describes the tools that they offer.

The contract is the same as for TRL's `environment_factory`: `reset` begins an episode, `get_reward` may score it, and
every other public method is a tool, described by its type hints and its docstring in Google's style. An addition to
TRL's contract is the optional method `get_call_reward`, which may reward each call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from asyncrl.config.imports import imported
from asyncrl.config.schema import ActorConfig
from asyncrl.data.facts import ENVIRONMENT
from asyncrl.data.sendable import schemas
from asyncrl.errors import ConfigError, ToolError
from asyncrl.text import reason_of
from asyncrl.types import Task

CALL_REWARD = "get_call_reward"
LIFE = ("reset", "get_reward", CALL_REWARD)
"""The public methods that are not tools."""

Function = Mapping[str, Any]


@dataclass(frozen=True)
class EnvironmentClass:
    """A class of environments. `name` is the name of its reward, and `functions` are the schemas of its tools by name.

    `rewards` is true if it has `get_reward`, and `call_rewards` if it has `get_call_reward`.
    """

    name: str
    make: Callable[[], Any]
    functions: Mapping[str, Function]
    rewards: bool
    call_rewards: bool = False


def environment_classes(actor: ActorConfig) -> dict[str, EnvironmentClass]:
    """Maps the names that tasks use to the classes. The class of `actor.environment`, which plays all tasks, has the
    empty name.

    Raises ConfigError: a class cannot be used.
    """
    if actor.environment is not None:
        setting = f"actor.environment={actor.environment}"
        return {"": _load(actor.environment.rpartition(".")[2], actor.environment, setting)}
    return {name: _load(name, path, f"actor.environments: {name}={path}") for name, path in actor.environments.items()}


def class_of(classes: Mapping[str, EnvironmentClass], task: Task) -> EnvironmentClass:
    """The class of the task's environment. Raises ToolError: the environment that the task names is not on offer, or
    the task names no environment."""
    if "" in classes:
        return classes[""]
    name = task.extra_info.get(ENVIRONMENT)
    if not isinstance(name, str) or name not in classes:
        raise ToolError(f"task {task.id} has {ENVIRONMENT}={name!r:.100}; actor.environments has {', '.join(classes)}")
    return classes[name]


def may_reward_turns(actor: ActorConfig) -> bool:
    """True if turns may have rewards: from a simulated user, an agent, a tool written for verl, or an environment with
    `get_call_reward`.

    Raises ConfigError: the class of an environment cannot be imported.
    """
    paths = {f"actor.environments: {name}={path}": path for name, path in actor.environments.items()}
    if actor.environment is not None:
        paths[f"actor.environment={actor.environment}"] = actor.environment
    return (
        bool(actor.interactions or actor.verl_tools)
        or actor.played_by is not None
        or any(hasattr(imported(path, setting), CALL_REWARD) for setting, path in paths.items())
    )


def _load(name: str, path: str, setting: str) -> EnvironmentClass:
    cls = imported(path, setting, "the dotted path of a class, such as my_environments.Guess")
    if not isinstance(cls, type):
        raise ConfigError(f"{setting} is not a class; give a class with a method reset (docs/environments.md)")
    if not callable(getattr(cls, "reset", None)):
        raise ConfigError(f"{setting} has no method reset, which begins an episode (docs/environments.md)")
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise ConfigError(
            f"{setting} must be made without arguments: {error}; `reset` gets the task's row as keywords"
        ) from error
    rewards, call_rewards = (callable(getattr(cls, method, None)) for method in ("get_reward", CALL_REWARD))
    return EnvironmentClass(name, cls, _functions(cls, setting), rewards, call_rewards)


def _functions(cls: type, setting: str) -> dict[str, Function]:
    """The schemas of the public methods. Raises ConfigError: a public method cannot be a tool."""
    from transformers.utils.chat_template_utils import get_json_schema

    functions = {}
    # The class is inspected, not an object: for an object, `getmembers` would compute its properties.
    for name, function in inspect.getmembers(cls, inspect.isfunction):
        if name.startswith("_") or name in LIFE:
            continue
        try:
            described = get_json_schema(_as_called(cls, name, function))
            (functions[name],) = (schema["function"] for schema in schemas(described))
        except Exception as error:
            raise ConfigError(
                f"{setting}: the method {name} cannot be a tool: {reason_of(error)}; give each argument a type hint "
                "and a line in a Google docstring, or begin the name of a method that is not a tool with _"
            ) from error
    return functions


def _as_called(cls: type, name: str, function: FunctionType) -> Callable[..., Any]:
    """The function as its caller sees it: without `self`."""
    static = isinstance(inspect.getattr_static(cls, name), staticmethod)
    return function if static else MethodType(function, object())
