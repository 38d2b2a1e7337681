"""verl's tools that are functions: the decorator `function_tool`, and the registry to which it adds them."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.compat.verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

Schema = OpenAIFunctionToolSchema
Function = TypeVar("Function", bound=Callable[..., Any])
LONGEST_RETURN = 3


@dataclass
class FunctionTool:
    """A function that the policy may call. Unlike a BaseTool, it has no instance in each episode."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters: dict[str, Any]) -> Any:
        """The result of the function. A function that is not async runs in a thread."""
        return await (self.fn(**parameters) if self.is_async else asyncio.to_thread(self.fn, **parameters))


class FunctionTools:
    """The function tools of a process. `names` returns the content of verl's module, whose functions use `registry`."""

    def __init__(self) -> None:
        self.registry: dict[str, FunctionTool] = {}
        self._loaded: dict[Path, list[FunctionTool]] = {}

    def names(self) -> Mapping[str, Any]:
        return {
            "FUNCTION_TOOL_REGISTRY": self.registry,
            "FunctionTool": FunctionTool,
            "function_tool": self.function_tool,
            "get_function_tool": self.get_function_tool,
            "load_function_tools_from_path": self.load_function_tools_from_path,
            "normalize_function_tool_return": normalize_function_tool_return,
        }

    def function_tool(
        self,
        name: str | Callable[..., Any] | None = None,
        *,
        schema: Schema | dict[str, Any] | None = None,
    ) -> Any:
        """Register a function as a tool: `@function_tool`, or `@function_tool(name, schema=...)`.

        Without `schema`, the schema is made from the function's type hints and its docstring in Google's style. Raises
        ValueError: the function takes `*args` or `**kwargs`, or another function has the name.
        """
        if callable(name) and schema is None:
            return self._noted(name, None, None)

        def decorate(function: Function) -> Function:
            return self._noted(function, name if isinstance(name, str) else None, schema)

        return decorate

    def get_function_tool(self, name: str) -> FunctionTool:
        """Raises KeyError: there is no such tool."""
        if name not in self.registry:
            raise KeyError(f"there is no function tool {name!r}; name its file as function_tool_path")
        return self.registry[name]

    def load_function_tools_from_path(self, path: str) -> list[FunctionTool]:
        """Run a Python file, and return the tools that it registered, sorted by name. A file runs only once.

        Raises FileNotFoundError: there is no such file. Raises what the file raises.
        """
        file = Path(path).resolve()
        if not file.is_file():
            raise FileNotFoundError(f"function_tool_path does not exist: {path}")
        if file not in self._loaded:
            before = set(self.registry)
            _run(file)
            self._loaded[file] = [self.registry[name] for name in sorted(set(self.registry) - before)]
        return self._loaded[file]

    def _noted(self, function: Function, given: str | None, schema: Schema | dict[str, Any] | None) -> Function:
        name = given or function.__name__
        found = _schema_of(function, name) if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
        known = self.registry.get(name)
        if known is not None and known.fn is not function:
            raise ValueError(
                f"function tool {name!r} is already {known.fn.__module__}.{known.fn.__qualname__}; give "
                f"{function.__module__}.{function.__qualname__} another name"
            )
        self.registry[name] = FunctionTool(name, function, found, inspect.iscoroutinefunction(function))
        return function


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Read what a function returned: a response alone, or a tuple of a response, maybe a score, and maybe numbers.

    Return all three; a missing score is 0, and missing numbers are an empty mapping.

    Raises TypeError: the tuple is empty or has more than three elements.
    """
    if not isinstance(ret, tuple):
        return _response(ret), 0.0, {}
    if not 1 <= len(ret) <= LONGEST_RETURN:
        raise TypeError(
            f"a function tool returned {len(ret)} values ({ret!r:.200}); return the response, or (response, reward, "
            "metrics)"
        )
    response, reward, metrics = (*ret, None, None)[:LONGEST_RETURN]
    return _response(response), 0.0 if reward is None else float(reward), {} if metrics is None else dict(metrics)


def _response(value: Any) -> ToolResponse:
    if isinstance(value, ToolResponse):
        return value
    return ToolResponse(text=json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value))


def _schema_of(function: Callable[..., Any], name: str) -> OpenAIFunctionToolSchema:
    parameters = inspect.signature(function).parameters.values()
    variadic = [str(each) for each in parameters if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if variadic:
        raise ValueError(
            f"function tool {name!r} takes {', '.join(variadic)}, which no schema can express; name its "
            "parameters one by one"
        )
    # This import takes seconds. Only a function without a given schema needs it.
    from transformers.utils.chat_template_utils import get_json_schema

    schema = get_json_schema(function)
    schema["function"]["name"] = name
    return OpenAIFunctionToolSchema.model_validate(schema)


def _run(file: Path) -> None:
    """Run a Python file as a module whose name is made from the file's path."""
    name = f"_function_tools_of_{'_'.join(file.with_suffix('').parts[1:])}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"function_tool_path={file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
