"""Finds tools by name: built-in tools, and any class by its dotted path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncrl.chat.formats.schemas import ANY
from asyncrl.config.extensions import EXTENSIONS
from asyncrl.config.imports import imported
from asyncrl.config.keys import did_you_mean
from asyncrl.config.schema import ActorConfig
from asyncrl.errors import ConfigError
from asyncrl.plain import copied
from asyncrl.tools.base import Tool

BUILT_IN: Mapping[str, str] = {
    "calculator": "asyncrl.tools.calculator.Calculator",
    "fetch": "asyncrl.tools.fetch.FetchPage",
    "python": "asyncrl.tools.python_sandbox.PythonSandbox",
    "python_session": "asyncrl.tools.python_session.PythonSession",
    "search": "asyncrl.tools.search.tool.SearchPassages",
    "slow_calculator": "asyncrl.tools.delayed.SlowCalculator",
}


def tool_classes(actor: ActorConfig) -> dict[str, type[Tool]]:
    """The classes of `actor.tools` and `actor.verl_tools`, by the names that the policy uses.

    Raises ConfigError: a tool cannot be used, or two tools have the same name.
    """
    classes: dict[str, type[Tool]] = {}
    for setting, cls in _loaded(actor):
        shown = str(cls.schema["name"])
        if shown in classes:
            raise ConfigError(f"{setting} and another tool are both called {shown!r}; keep one of them")
        cls.prepare()
        classes[shown] = cls
    return classes


def _loaded(actor: ActorConfig) -> Iterator[tuple[str, type[Tool]]]:
    """Each class with the setting that names it."""
    for name in actor.tools:
        yield f"actor.tools: {name!r}", _load(name).configured(copied(actor))
    if actor.verl_tools:
        verl_tools = imported(EXTENSIONS["actor.verl_tools"], "actor.verl_tools")
        for cls in verl_tools(copied(actor.verl_tools)):
            yield f"actor.verl_tools: {cls.schema['name']}", cls


def refuse_unknown(name: str) -> None:
    """Raises ConfigError: `name`, an item of `actor.tools`, is neither a built-in tool nor a path."""
    if name not in BUILT_IN and "." not in name:
        known = ", ".join(BUILT_IN)
        hint = did_you_mean(name, BUILT_IN) or f"; use one of {known}, or the dotted path of a class"
        raise ConfigError(f"actor.tools: there is no tool {name!r}{hint}")


def _load(name: str) -> type[Tool]:
    refuse_unknown(name)
    path = BUILT_IN.get(name, name)
    cls = imported(path, f"actor.tools: {name!r}", "the dotted path of a class, such as my_tools.Weather")
    if not (isinstance(cls, type) and issubclass(cls, Tool)):
        raise ConfigError(f"actor.tools: {name!r} must be a subclass of asyncrl.tools.Tool")
    _refuse_incomplete(name, getattr(cls, "schema", None))
    _refuse_unknown_types(name, cls.schema["parameters"])
    return cls


def _refuse_incomplete(name: str, schema: object) -> None:
    known = schema if isinstance(schema, Mapping) else {}
    lacking = [each for each in ("name", "description", "parameters") if each not in known]
    if not lacking:
        return
    inner = "; give the object under `function` alone" if "function" in known else ""
    raise ConfigError(
        f"actor.tools: {name!r} needs a `schema` with name, description and parameters; it lacks {', '.join(lacking)}"
        f"{inner}"
    )


def _refuse_unknown_types(name: str, parameters: object) -> None:
    """Refuse parameters with a misspelt type: such a type would permit every value."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    for parameter, schema in properties.items() if isinstance(properties, Mapping) else ():
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        for kind in kinds if isinstance(kinds, list | tuple) else (kinds,):
            if isinstance(kind, str) and kind not in ANY:
                raise ConfigError(
                    f"actor.tools: {name!r} has a `schema` whose parameter {parameter!r} is of the unknown type "
                    f"{kind!r}{did_you_mean(kind, sorted(ANY))}"
                )
