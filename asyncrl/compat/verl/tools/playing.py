"""Tools written for verl as the tools of a run (`actor.verl_tools`).

One object of verl's class serves all episodes of a process. For each episode, its method `create` gets an instance id,
and may return another one. The methods `execute`, `calc_reward` and `release` then get the returned id.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from numbers import Real
from typing import Any, ClassVar

from asyncrl.compat.verl.names import provide_verl
from asyncrl.compat.verl.tools.registry import ToolType, made_tool
from asyncrl.config.imports import imported
from asyncrl.data.sendable import schemas
from asyncrl.errors import ConfigError
from asyncrl.machine.process import is_ctrl_c
from asyncrl.masking import masked
from asyncrl.plain import copied
from asyncrl.text import reason_of
from asyncrl.tools.base import Scored, Tool
from asyncrl.tools.call_threads import CallThreads
from asyncrl.tools.results import Content

SETTING = "actor.verl_tools"
FORM = "{class_name: module.Class, config: {...}, tool_schema: {...}} or {function_tool_path: FILE}"
FUNCTIONS = "function_tool_path"
METHODS = ("create", "execute", "calc_reward", "release")
ANSWER = 3
"""The number of values that `execute` returns."""


@dataclass
class ToolsData:
    """The argument `agent_data` of `execute`. All tools of an episode share it."""

    request_id: str
    extra_fields: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)


class VerlTool(Tool):
    """A tool in one episode. `theirs` is the object of verl's class, which all episodes share."""

    theirs: ClassVar[Any]
    takes_call_kwargs = True
    _instance: Any = None

    async def create(self, **kwargs: Any) -> None:
        create = self.theirs.create
        offered = {"instance_id": self.episode, "create_kwargs": kwargs}
        given = {name: value for name, value in offered.items() if _takes(create, name)}
        # Early releases of verl pass the arguments one by one, later ones as the mapping `create_kwargs`. A method with
        # the parameter `create_kwargs` may also have parameters with the names of single arguments, and gets both.
        if _names(create, "create_kwargs"):
            kwargs = {name: value for name, value in kwargs.items() if _takes(create, name)}
        # A `create` that fails may have taken resources, which `release` must release.
        self._instance = self.episode
        made = await create(**{**given, **kwargs})
        made = made[0] if isinstance(made, tuple) else made
        self._instance = self.episode if made is None else made

    async def execute(self, arguments: Mapping[str, Any]) -> Content | Scored:
        more = self._kwargs("execute_kwargs")
        if _takes(self.theirs.execute, "agent_data"):
            more.setdefault("agent_data", self.shared.setdefault("agent_data", ToolsData(self.episode)))
        answer = await self.theirs.execute(self._instance, dict(arguments), **more)
        if not (isinstance(answer, tuple) and len(answer) == ANSWER):
            raise TypeError(f"execute returned {answer!r:.200}, not (response, reward, metrics)")
        return _read(*answer[:2])

    async def reward(self) -> float | None:
        base = import_module("verl.tools.base_tool").BaseTool
        if getattr(type(self.theirs), "calc_reward", None) is base.calc_reward:
            return None
        reward = await self.theirs.calc_reward(self._instance, **self._kwargs("calc_reward_kwargs"))
        return float(reward) if hasattr(reward, "__float__") else None

    async def release(self) -> None:
        if self._instance is not None:
            await self.theirs.release(self._instance, **self._kwargs("release_kwargs"))

    def _kwargs(self, field: str) -> dict[str, Any]:
        """The task's arguments for a method. Each call gets copies, since it may change them."""
        return copied(dict(self.call_kwargs[field]))


class FunctionThreads:
    """A service without sessions: the threads in which a function tool of verl runs, unless it is async."""

    def __init__(self, tool: str) -> None:
        self.name = f"the function tool {tool}"
        self._threads = CallThreads(self.name)

    async def call(self, function: Callable[[], Any]) -> Any:
        """The result of `function`. Passes on its errors."""
        return await self._threads.call(function)

    def session(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def close(self) -> None:
        """Do nothing: each thread ends with its call."""

    def counters(self) -> Mapping[str, float]:
        return {"tool_stuck": self._threads.stuck}


class VerlFunction(Tool):
    """A function as a tool. As in verl, the arguments for it in the task's `tools_kwargs` have no effect."""

    theirs: ClassVar[Any]
    takes_call_kwargs = True
    service: ClassVar[FunctionThreads]

    async def execute(self, arguments: Mapping[str, Any]) -> Content | Scored:
        normalize = import_module("verl.tools.function_tool").normalize_function_tool_return
        call = partial(self.theirs.fn, **arguments)
        result = await (call() if self.theirs.is_async else self.service.call(call))
        response, score, _ = normalize(result)
        # verl counts a missing score as 0. Here it stays None, since a score of 0 means that the call was judged.
        is_scored = isinstance(result, tuple) and len(result) > 1 and result[1] is not None
        return _read(response, score if is_scored else None)

    async def reward(self) -> None:
        """A function judges no episode."""


def verl_tools(entries: Sequence[Any]) -> list[type[Tool]]:
    """A class for each tool of `actor.verl_tools`. Raises ConfigError: a tool cannot be made."""
    try:
        import pydantic
    except ImportError as error:
        raise ConfigError(f"{SETTING} needs the extra: pip install 'asyncrl[verl]' ({error})") from error
    del pydantic
    provide_verl()
    # A process opens its tools several times, but makes each object once: its constructor may start a pool of threads.
    return [_class_of(tool) for entry in entries for tool in _made(json.dumps(entry, default=str))]


@cache
def _made(text: str) -> tuple[Any, ...]:
    """The tools of an entry, which is JSON text. Raises ConfigError: it has another form, or a tool cannot be made."""
    entry = json.loads(text)
    match entry:
        case {"function_tool_path": str(path), **rest} if not rest:
            load: Callable[[str], list[Any]] = import_module("verl.tools.function_tool").load_function_tools_from_path
            return tuple(_guarded(f"{SETTING}: {FUNCTIONS}={path}", lambda: _nonempty(load(path))))
        case {"class_name": str(path), **rest} if rest.keys() <= {"config", "tool_schema"}:
            return (_made_native(path, entry),)
    raise ConfigError(f"{SETTING} has {masked(entry)!r:.200}; each entry must be {FORM}")


def _made_native(path: str, entry: Mapping[str, Any]) -> Any:
    setting = f"{SETTING}: class_name={path}"
    if (kind := (entry.get("config") or {}).get("type", "native")) != ToolType.NATIVE.value:
        raise ConfigError(f"{setting}: config.type={kind!r:.50} is unknown; name MCP servers in actor.mcp_servers")
    cls = imported(path, setting, "the dotted path of a class written for verl")
    for method in METHODS:
        if not inspect.iscoroutinefunction(getattr(cls, method, None)):
            raise ConfigError(f"{setting} has no `async def {method}`, as verl's tools have")
    return _guarded(setting, lambda: made_tool(cls, entry))


def _guarded(setting: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ConfigError(f"{setting} cannot be used: {reason_of(error)}") from error


def _nonempty(tools: list[Any]) -> list[Any]:
    if not tools:
        raise ValueError("the file decorates no function with @function_tool")
    return tools


def _class_of(tool: Any) -> type[Tool]:
    """Raises ConfigError: the tool's schema cannot be used."""
    try:
        (function,) = schemas(tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)["function"])
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{SETTING}: the schema of {type(tool).__name__} cannot be used: {error}") from error
    kind: type[Tool] = VerlTool if hasattr(tool, "execute") else VerlFunction
    # Before a run starts, it tries the tools that come from the user's own modules. It recognises them by `__module__`.
    module = getattr(tool, "fn", type(tool)).__module__
    parts = {"theirs": tool, "schema": {"parameters": _NONE, **function}, "__module__": module}
    if kind is VerlFunction:
        parts["service"] = FunctionThreads(tool.name)
    return type(kind.__name__, (kind,), parts)


_NONE: Mapping[str, Any] = {"type": "object", "properties": {}}


def _read(response: Any, score: Any) -> Content | Scored:
    """The content of verl's response, or of a text, with the call's score unless that is None. Raises TypeError: the
    score is not a number."""
    content = _content(response)
    if score is None:
        return content
    if not (isinstance(score, Real) or hasattr(score, "__float__")):
        raise TypeError(f"the reward of a call is {score!r:.100}, not a number or None")
    return Scored(content, float(score))


def _content(response: Any) -> Content:
    if isinstance(response, str):
        return response
    if response.video:
        raise NotImplementedError("a tool answered with a video; the policy sees texts and images")
    blocks = [{"type": "image", "image": image} for image in response.image or () if image is not None]
    text = response.text or ""
    return [*blocks, *([{"type": "text", "text": text}] if text else [])] if blocks else text


def _parameters(method: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    yield from inspect.signature(method).parameters.values()


def _names(method: Callable[..., Any], name: str) -> bool:
    return any(each.name == name for each in _parameters(method))


def _takes(method: Callable[..., Any], name: str) -> bool:
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in _parameters(method))
