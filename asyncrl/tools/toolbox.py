"""Opens the tools of an actor for each episode, and calls them.

The policy reads the result of a call: a tool's text or images, or the reason for a refusal or a malformed call. If a
tool raises anything else, or takes too long, the call is retried; if it fails too often, ToolError ends the episode.
Every open tool is released exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from asyncrl.chat.parsing import MalformedCall
from asyncrl.errors import ToolError
from asyncrl.machine.finishing import finish
from asyncrl.network.throttle import ErrorLogger
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.plain import copied
from asyncrl.text import own_line, reason_of, short_repr
from asyncrl.tools.base import Scored, StateLostError, Tool, ToolRefusal
from asyncrl.tools.contained import contained
from asyncrl.tools.results import Content, cut_content, read_content
from asyncrl.types import LARGEST_FLOAT32, Task, Ticket, ToolCall

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_KWARGS = ("execute_kwargs", "calc_reward_kwargs", "release_kwargs")
"""The fields of an entry of a task's `tools_kwargs` that have the arguments of methods other than `create`. The names
are those of verl's data."""
SELECTION = "tool_selection"
"""The field of a task's `extra_info` with the names of its tools, as in verl's data."""


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits of a call.

    - `timeout_s`: how many seconds one try may take
    - `retries`: how many tries may follow the first one, if tries fail
    - `max_chars`: how many characters of a result the policy reads at most
    """

    timeout_s: float = 10.0
    retries: int = 2
    max_chars: int = 4096


@dataclass(slots=True)
class ToolCounts:
    """Counts since the actor started.

    - `calls`: all calls
    - `malformed`: malformed calls; `unknown`: calls of tools that do not exist; `refused`: calls that a tool refused
    - `failures`: tries in which a tool failed
    """

    calls: int = 0
    malformed: int = 0
    unknown: int = 0
    refused: int = 0
    failures: int = 0


class Toolbox:
    """The tools on offer, by the names that the policy uses. `spans` records each call."""

    def __init__(self, classes: Mapping[str, type[Tool]], limits: ToolLimits, spans: Spans | None = None) -> None:
        self._classes = classes
        # Schemas are copied: a tool may change the schema of its class, but the policy must always read the same one.
        self._functions = {name: copied(dict(cls.schema)) for name, cls in classes.items()}
        self._limits = limits
        self._spans = spans or NoSpans()
        self.counts = ToolCounts()
        self._error_logger = ErrorLogger(log)
        self._services = {cls.service.name: cls.service for cls in classes.values() if cls.service is not None}

    @property
    def functions(self) -> dict[str, Mapping[str, Any]]:
        """The tools' own function objects by name."""
        return dict(self._functions)

    def counters(self) -> Mapping[str, float]:
        """The counts of tools and services, by the names of metrics."""
        counted = Counter({f"tool_{name}": count for name, count in asdict(self.counts).items()})
        for service in self._services.values():
            counted.update(service.counters())
        return counted

    async def close(self) -> None:
        """Release the resources of services that outlive episodes."""
        for service in self._services.values():
            await service.close()

    @asynccontextmanager
    async def open(self, ticket: Ticket) -> AsyncIterator[OpenTools]:
        """Open the tools of one episode: all tools, or only those that the task's own schemas name.

        Raises ToolError: the task names a tool that is not on offer, or a tool cannot be created.
        """
        schemas = self._schemas(ticket)
        tools = {name: self._classes[name](ticket.id) for name in schemas}
        shared: dict[str, Any] = {}
        async with AsyncExitStack() as stack:
            sessions = await self._sessions(tools, stack)
            for tool in tools.values():
                tool.shared = shared
                tool.session = sessions[tool.service.name] if tool.service is not None else None
            try:
                opened = OpenTools(
                    ticket.id, tools, schemas, self._limits, self.counts, self._error_logger, self._spans
                )
                await opened.create(ticket.task.tools_kwargs)
                yield opened
            finally:
                await finish(self._release_all(tools))

    async def _sessions(self, tools: Mapping[str, Tool], stack: AsyncExitStack) -> dict[str, Any]:
        """Open a session with each service of the tools."""
        # All episodes open sessions in the same order. In different orders, two of them could wait for each other.
        used = sorted({tool.service.name for tool in tools.values() if tool.service is not None})
        return {name: await stack.enter_async_context(self._services[name].session()) for name in used}

    async def _release_all(self, tools: Mapping[str, Tool]) -> None:
        for name, tool in tools.items():
            limit = asyncio.timeout(self._limits.timeout_s)
            try:
                async with limit:
                    await contained(tool.release)
            except Exception as error:
                reason = _reason(error, limit, self._limits.timeout_s)
                self._error_logger.exception(
                    f"tool {name}: `release` failed, but the episode keeps its outcome: {reason}", error
                )

    def _schemas(self, ticket: Ticket) -> dict[str, Mapping[str, Any]]:
        if not ticket.task.tools:
            return selected(self.functions, ticket.task)
        schemas = {schema["name"]: schema for schema in (tool.get("function", tool) for tool in ticket.task.tools)}
        if unknown := sorted(set(schemas) - set(self._classes)):
            raise ToolError(
                f"task {ticket.task.id} offers {', '.join(unknown)}; add it to actor.tools, actor.verl_tools or "
                "actor.mcp_servers"
            )
        return selected(schemas, ticket.task)


class OpenTools:
    """The open tools of one `episode`. `functions` has their schemas by name, and `shown` has them in the form for chat
    templates."""

    def __init__(
        self,
        episode: str,
        tools: Mapping[str, Tool],
        functions: Mapping[str, Mapping[str, Any]],
        limits: ToolLimits,
        counts: ToolCounts,
        error_logger: ErrorLogger,
        spans: Spans,
    ) -> None:
        self.functions = functions
        self._episode = episode
        self._spans = spans
        self.shown = [{"type": "function", "function": function} for function in functions.values()]
        self._tools = tools
        self._limits = limits
        self._counts = counts
        self._error_logger = error_logger
        self._used: set[str] = set()
        self._scores: list[float] = []

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """The messages that begin the episode: the task's messages, unchanged."""
        return tuple(messages)

    async def create(self, tools_kwargs: Mapping[str, Any]) -> None:
        """Prepare each tool with its entry of `tools_kwargs`. As in verl's data, the arguments of `create` may be in
        the entry's field `create_kwargs`. The fields of CALL_KWARGS have the arguments of other methods.

        Raises ToolError: `create` of a tool failed, or a field of its entry has no effect.
        """
        for name, tool in self._tools.items():
            kwargs, others = _divided(tools_kwargs.get(name) or {}, name, tool.takes_call_kwargs)
            tool.call_kwargs = copied(others)
            await self._within_limits(name, "create", tool.create, **kwargs)

    async def answer(self, calls: Sequence[ToolCall | MalformedCall]) -> list[Content]:
        """Run the calls at the same time. Returns their results in the order of the calls. Raises ToolError: a tool
        failed."""
        self._counts.calls += len(calls)
        self._scores = []
        if len(calls) == 1:
            # Most turns have one call, which needs no asyncio task of its own.
            return [cut_content(await self._answer(calls[0]), self._limits.max_chars)]
        answers = await asyncio.gather(*map(self._answer, calls), return_exceptions=True)
        results = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            results.append(cut_content(answer, self._limits.max_chars))
        return results

    @property
    def turn_reward(self) -> float | None:
        """The sum of the scores of the calls of the last turn. None: no call has a score.

        Raises ToolError: the sum is not a finite float32.
        """
        # The sum must not depend on the order in which the calls ended.
        return _finite(math.fsum(self._scores), "the sum of the scores of calls") if self._scores else None

    async def rewards(self) -> dict[str, float]:
        """Collect the rewards of the tools that were used and judge something.

        Raises ToolError: a tool failed, or its reward is not finite.
        """
        rewards = {}
        for name in sorted(self._used):
            reward = await self._within_limits(name, "reward", self._tools[name].reward)
            if reward is not None:
                rewards[name] = _finite(reward, f"the reward of tool {name}")
        return rewards

    async def _answer(self, call: ToolCall | MalformedCall) -> Content:
        if isinstance(call, MalformedCall):
            self._counts.unknown += call.unknown
            self._counts.malformed += not call.unknown
            return call.error
        self._used.add(call.name)
        tool = self._tools[call.name]
        try:
            with self._spans.span(f"tool {call.name}", episode=self._episode):
                answer = await self._within_limits(call.name, "execute", tool.execute, call.arguments)
        except ToolRefusal as refusal:
            self._counts.refused += 1
            return str(refusal)
        if isinstance(answer, Scored):
            self._scores.append(_finite(answer.score, f"the score of a call of tool {call.name}"))
            answer = answer.content
        try:
            # Reading runs in a thread, because encoding a picture takes a while.
            content = answer if isinstance(answer, str) else await asyncio.to_thread(read_content, answer)
        except (ValueError, TypeError, OSError) as error:
            raise ToolError(f"tool {call.name} answered with an image that cannot be saved: {error}") from error
        if content is None:
            kind = type(answer).__name__
            raise ToolError(f"tool {call.name} answered with {kind}, not with text, or a list of texts and images")
        return content

    async def _within_limits(
        self, name: str, what: str, method: Callable[..., Awaitable[T]], /, *arguments: Any, **kwargs: Any
    ) -> T:
        """Call a method of a tool until it succeeds. Each attempt gets copies of the arguments, since a method may
        change them.

        Raises ToolError: the method failed too often, or lost the episode's state.
        """
        limit_s = None if self._tools[name].limits_itself else self._limits.timeout_s
        for attempt in range(1, self._limits.retries + 2):
            limit = asyncio.timeout(limit_s)
            try:
                async with limit:
                    return await contained(lambda: method(*copied(arguments), **copied(kwargs)))
            except ToolRefusal:
                raise
            except StateLostError as error:
                self._counts.failures += 1
                raise ToolError(f"tool {name}: `{what}` failed: {error}") from error
            except Exception as error:
                self._counts.failures += 1
                reason = _reason(error, limit, limit_s)
                self._error_logger.exception(f"tool {name}: `{what}` failed in attempt {attempt}: {reason}", error)
        raise ToolError(f"tool {name}: `{what}` failed {attempt} times, at last with {reason}")


def selected(functions: Mapping[str, Mapping[str, Any]], task: Task) -> dict[str, Mapping[str, Any]]:
    """The tools that a task selects by its field SELECTION. Without this field, or if it is empty, all `functions`.

    Raises ToolError: it is not a list of names, or names a tool that is not on offer.
    """
    names = task.extra_info.get(SELECTION)
    if not names:
        return dict(functions)
    setting = f"extra_info.{SELECTION} of task {task.id}"
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise ToolError(f"{setting} is {names!r:.100}; it must be a list of names of tools")
    if unknown := [str(name) for name in names if name not in functions]:
        raise ToolError(
            f"{setting} names {', '.join(unknown)}; leave it out there, or add it to actor.tools, actor.verl_tools or "
            "actor.mcp_servers"
        )
    return {name: functions[name] for name in names}


def _divided(
    entry: Mapping[str, Any], name: str, takes_call_kwargs: bool
) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
    """The arguments of `create` in the entry of a task's `tools_kwargs`, and those of other methods.

    Raises ToolError: a field of the entry has no effect.
    """
    # In Parquet, each row has the fields of all rows. Those that it lacks are null.
    outer = {key: value for key, value in entry.items() if key not in ("create_kwargs", *CALL_KWARGS)}
    others = {key: entry.get(key) or {} for key in CALL_KWARGS}
    if (inner := entry.get("create_kwargs")) is None:
        inner, outer = outer, {}
    useless = [key for key, value in outer.items() if value is not None]
    if not takes_call_kwargs:
        useless += [key for key, value in others.items() if value]
    if useless:
        raise ToolError(
            f"extra_info.tools_kwargs.{name}: {', '.join(useless)} has no effect on this tool; leave it out"
        )
    return inner, others


def _finite(value: Any, what: str) -> float:
    """Raises ToolError: `value` is not a finite float32."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= LARGEST_FLOAT32:
        raise ToolError(f"{what} is {short_repr(value)}; it must be a finite number")
    return number


def _reason(error: Exception, limit: asyncio.Timeout, limit_s: float | None) -> str:
    """The reason for a failure, with the key of the limit if the tool took too long."""
    if not (isinstance(error, TimeoutError) and limit.expired()):
        return reason_of(error)
    # The cause was raised at the line of the tool that was interrupted.
    line = own_line(error.__cause__) if error.__cause__ else ""
    return f"TimeoutError: it took longer than actor.tool_timeout_s={limit_s:g} s{f' ({line})' if line else ''}"
