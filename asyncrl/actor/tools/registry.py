"""Tools by name: the built-in ones, and any class by its dotted path."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from asyncrl.actor.tools.base import Tool
from asyncrl.errors import ConfigError

BUILT_IN: Mapping[str, str] = {
    "calculator": "asyncrl.actor.tools.calculator.Calculator",
    "python": "asyncrl.actor.tools.python_sandbox.PythonSandbox",
    "slow_calculator": "asyncrl.actor.tools.delayed.SlowCalculator",
}


def tool_classes(names: Sequence[str]) -> dict[str, type[Tool]]:
    """The classes that `actor.tools` names, by the name that the policy calls them. Raises ConfigError."""
    classes: dict[str, type[Tool]] = {}
    for name in names:
        cls = _load(name)
        called = str(cls.schema["name"])
        if called in classes:
            raise ConfigError(f"actor.tools: {name!r} and another tool are both called {called!r}; keep one of them")
        cls.prepare()
        classes[called] = cls
    return classes


def _load(name: str) -> type[Tool]:
    module, dot, attribute = BUILT_IN.get(name, name).rpartition(".")
    known = f"use one of {', '.join(BUILT_IN)}, or the dotted path of a class, such as my_tools.Weather"
    if not dot:
        raise ConfigError(f"actor.tools: there is no tool {name!r}; {known}")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"actor.tools: cannot load {name!r} ({error}); {known}") from error
    if not (isinstance(cls, type) and issubclass(cls, Tool)):
        raise ConfigError(f"actor.tools: {name!r} is no subclass of asyncrl.actor.tools.base.Tool")
    if not isinstance(getattr(cls, "schema", None), Mapping) or "name" not in cls.schema:
        raise ConfigError(f"actor.tools: {name!r} needs a `schema` with name, description and parameters")
    return cls
