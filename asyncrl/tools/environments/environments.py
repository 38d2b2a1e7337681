"""Opens an environment of the actor for each episode, and calls its methods.

Each episode has its own object of the environment's class. `reset` gets the task's row, and returns text or images that
are added to the prompt. Calls run one after another, even within one turn. `get_call_reward` may reward each call.

If a tool raises an exception, the policy reads its text, because an environment may refuse a move in this way. The
environment has failed if `get_reward` or `get_call_reward` raises, if `reset` keeps raising, or if a call takes too
long, since the object's state is then unknown. It has also failed if a tool raises an error that no move can cause,
such as an unknown name. When the environment fails, the episode fails, and is played again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from asyncrl.chat.history import Message
from asyncrl.chat.parsing import MalformedCall
from asyncrl.errors import ToolError
from asyncrl.machine.finishing import finish
from asyncrl.network.throttle import ErrorLogger
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.plain import copied
from asyncrl.text import is_own, line_of_function, own_line, reason_of
from asyncrl.tools.base import ToolRefusal
from asyncrl.tools.contained import contained
from asyncrl.tools.environments import values
from asyncrl.tools.environments.classes import CALL_REWARD, EnvironmentClass, Function, class_of
from asyncrl.tools.environments.thread import EpisodeThread
from asyncrl.tools.results import Content, cut_content
from asyncrl.tools.toolbox import ToolCounts, ToolLimits
from asyncrl.types import Task, Ticket, ToolCall

log = logging.getLogger(__name__)

CLOSE = "_close"
"""An optional method that releases what the object holds."""

Read = Callable[[Any], Any]

FAULTS = (NameError, ImportError, SyntaxError)
"""Errors of a tool whose cause is the tool's code, not the policy's move."""

MAX_STUCK = 1000
"""The maximum number of threads whose call does not return. Once it is reached, no episode begins, because each thread
holds memory."""


@dataclass(slots=True)
class EnvironmentCounts:
    """Counts since the actor started, except `stuck`.

    - `resets`: episodes that have begun
    - `errors`: errors of tools that the policy read
    - `failures`: failures of environments
    - `stuck`: the current number of threads whose call took too long and has not returned
    """

    resets: int = 0
    errors: int = 0
    failures: int = 0
    stuck: int = 0


class MissingFieldError(ToolError):
    """`reset` takes a field that the task's row lacks. A retry cannot help."""


class Environments:
    """The environments on offer, by the names that tasks use.

    `limits` apply to each call, but only `reset` is retried (`limits.retries`). Each retry makes a new object. `spans`
    records each call. If a tool raises one of the `faults`, the environment has failed.
    """

    def __init__(self, classes: Mapping[str, EnvironmentClass], limits: ToolLimits, spans: Spans | None = None) -> None:
        self.limits = limits
        self.spans = spans or NoSpans()
        self.counts = EnvironmentCounts()
        self.tool_counts = ToolCounts()
        self.faults: tuple[type[Exception], ...] = FAULTS
        self._classes = classes
        self._error_logger = ErrorLogger(log)
        self._silent: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def counters(self) -> Mapping[str, float]:
        """The counts of tools and environments, by the names of metrics."""
        named = {"tool": asdict(self.tool_counts), "environment": asdict(self.counts)}
        return {f"{kind}_{name}": count for kind, each in named.items() for name, count in each.items()}

    async def close(self) -> None:
        """Do nothing: environments hold nothing that outlives episodes."""

    @asynccontextmanager
    async def open(self, ticket: Ticket) -> AsyncIterator[OpenEnvironment]:
        """Make and `reset` the environment of one episode.

        Raises ToolError: the task names an unknown environment or tool, or `reset` failed.
        """
        if self.counts.stuck >= MAX_STUCK:
            raise ToolError(
                f"{MAX_STUCK} calls of environments have not returned; find out what their methods wait for"
            )
        opened = await self._begin(ticket)
        try:
            yield opened
        finally:
            await finish(opened.close())

    async def _begin(self, ticket: Ticket) -> OpenEnvironment:
        """Make and reset an environment, with retries. Raises ToolError: the last retry failed, too."""
        cls, row = class_of(self._classes, ticket.task), values.row_of(ticket.task, several="" not in self._classes)
        reason = ""
        for _ in range(self.limits.retries + 1):
            opened = OpenEnvironment(cls, ticket, self)
            try:
                with self.spans.span("reset", episode=ticket.id):
                    await opened.reset(copied(row))
            except ToolError as error:
                reason = str(error)
                await finish(opened.close())
                if isinstance(error, MissingFieldError):
                    raise
            except BaseException:
                await finish(opened.close())
                raise
            else:
                self.counts.resets += 1
                return opened
        raise ToolError(f"{reason} ({self.limits.retries + 1} tries)")

    def failed(self, reason: str, cause: Exception) -> ToolError:
        """Count and log a failure, and return it as an error to raise."""
        self.counts.failures += 1
        self._error_logger.exception(reason, cause)
        return ToolError(reason)

    def raised(self, reason: str, cause: Exception) -> None:
        """Count and log an error that a tool raised."""
        self.counts.errors += 1
        self._error_logger.exception(reason, cause, traced=False)

    def note_silent(self, tool: str, what: str, place: str) -> None:
        """Warn, once per tool, that the tool of the environment `what` returned None."""
        if (tool, what) not in self._silent:
            self._silent.add((tool, what))
            log.warning(
                "tool %s of %s%s returned None, so the policy reads the text None: return a text", tool, what, place
            )

    def change_stuck(self, by: int) -> None:
        """Add `by` to the number of stuck threads. Any thread may call this."""
        with self._lock:
            self.counts.stuck += by


def _unchanged(result: Any) -> Any:
    return result


class OpenEnvironment:
    """The environment of one episode. `reset` makes its object, of the class `cls`.

    After a call that took too long, the object gets no more calls.
    """

    def __init__(self, cls: EnvironmentClass, ticket: Ticket, environments: Environments) -> None:
        self._cls = cls
        self._ticket = ticket
        self._environments = environments
        self._what = f"environment {cls.name}"
        self._object: Any = None
        self._observation: Content | None = None
        self._lost = False
        self._thread = EpisodeThread(f"environment-{ticket.id}", self._thread_ended)
        self._given_up = False
        self._call_rewards: list[float] = []
        self.functions = _offered(cls, ticket.task)
        self.shown = [{"type": "function", "function": function} for function in self.functions.values()]

    async def reset(self, row: Mapping[str, Any]) -> None:
        """Make the object and begin the episode. Raises ToolError: one of these failed."""
        self._object = await self._within_limits("__init__", self._cls.make)
        reset = self._object.reset
        if missing := values.missing(reset, row):
            raise MissingFieldError(
                f"reset of {self._what} takes {', '.join(missing)}{_defined(reset)}, which task {self._ticket.task.id} "
                f"lacks; its row has {', '.join(sorted(row))}: name the column in data.columns (docs/data.md), or give "
                "the parameter a default value"
            )
        observation = await self._within_limits("reset", partial(reset, **values.taken(reset, row)), values.observation)
        max_chars = self._environments.limits.max_chars
        self._observation = None if observation is None else cut_content(observation, max_chars)

    def prompt(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages of the task, with the result of `reset` at the end of the last user message."""
        return tuple(messages) if not self._observation else values.with_content_added(messages, self._observation)

    async def answer(self, calls: Sequence[ToolCall | MalformedCall]) -> list[Content]:
        """Run the calls one after another. Returns their results.

        Raises ToolError: the environment failed.
        """
        self._environments.tool_counts.calls += len(calls)
        self._call_rewards = []
        max_chars = self._environments.limits.max_chars
        return [cut_content(await self._answer(call), max_chars) for call in calls]

    @property
    def turn_reward(self) -> float | None:
        """The sum of the rewards for the last turn's calls, or None if no call has a reward."""
        return sum(self._call_rewards) if self._call_rewards else None

    async def rewards(self) -> dict[str, float]:
        """Maps the environment's name to the result of `get_reward`; empty if the class lacks this method. Raises
        ToolError: the method failed."""
        if not self._cls.rewards:
            return {}
        return {self._cls.name: await self._within_limits("get_reward", self._object.get_reward, values.reward)}

    async def close(self) -> None:
        """Release the object's resources, once. Never raises, so that the episode keeps its outcome."""
        if inspect.getattr_static(self._object, CLOSE, None) is not None and not self._lost:
            try:
                await self._within_limits(CLOSE, lambda: getattr(self._object, CLOSE)())
            except ToolError:
                log.debug("%s was not closed; the error was logged and counted", self._what)
        if self._thread.is_busy:
            self._given_up = True
            self._environments.change_stuck(1)
        self._thread.close()

    async def _answer(self, call: ToolCall | MalformedCall) -> Content:
        counts = self._environments.tool_counts
        if isinstance(call, MalformedCall):
            counts.unknown += call.unknown
            counts.malformed += not call.unknown
            return call.error
        try:
            with self._environments.spans.span(f"tool {call.name}", episode=self._ticket.id):
                method = partial(getattr(self._object, call.name), **copied(dict(call.arguments)))
                content: Content = await self._call(call.name, method, partial(self._read, call.name, method))
            await self._reward_call()
            return content
        except ToolError:
            raise
        except ToolRefusal as refusal:
            counts.refused += 1
            return str(refusal)
        except self._environments.faults as error:
            raise self._failed(call.name, reason_of(error), error) from error
        except Exception as error:  # noqa: BLE001 - the policy reads it
            self._environments.raised(f"tool {call.name} of {self._what} raised {reason_of(error)}", error)
            return f"Error: {_message_of(error)}"

    def _read(self, tool: str, method: Callable[..., Any], result: Any) -> Content:
        if result is None:
            self._environments.note_silent(tool, self._what, _defined(method))
        return values.shown(result)

    async def _reward_call(self) -> None:
        """Note the reward of a call that has returned. Raises ToolError: `get_call_reward` failed."""
        if self._cls.call_rewards:
            reward = await self._within_limits(CALL_REWARD, getattr(self._object, CALL_REWARD), values.call_reward)
            self._call_rewards += [] if reward is None else [reward]

    async def _within_limits(self, name: str, method: Callable[[], Any], read: Read = _unchanged) -> Any:
        """Call a method. Raises ToolError if it raises, returns a value that cannot be read, or takes too long."""
        try:
            return await self._call(name, method, read)
        except ToolError:
            raise
        except Exception as error:
            place = "" if own_line(error) else _defined(method)
            raise self._failed(name, f"{reason_of(error)}{place}", error) from error

    async def _call(self, name: str, method: Callable[[], Any], read: Read) -> Any:
        """Call a method and `read` its result, and pass on exceptions. Raises ToolError: the call took too long."""
        limit = asyncio.timeout(self._environments.limits.timeout_s)
        try:
            async with limit:
                return await contained(partial(self._result, method, read))
        except TimeoutError as error:
            if not limit.expired():
                raise
            self._lost = True
            seconds = f"it took more than actor.environment_timeout_s={self._environments.limits.timeout_s:g}"
            raise self._failed(name, seconds, error) from error
        except asyncio.CancelledError:
            self._lost = self._thread.is_busy
            raise

    async def _result(self, method: Callable[[], Any], read: Read) -> Any:
        function = method.func if isinstance(method, partial) else method
        result = method() if inspect.iscoroutinefunction(function) else await self._thread.call(method)
        # A decorator may hide that a method is a coroutine function. Then only its result shows it.
        if inspect.isawaitable(result):
            result = await result
        if result is None or type(result) in (str, int, float, bool):
            return read(result)
        # The value is read in the thread, too: reading may call the user's code, which may raise or take long.
        return await self._thread.call(partial(read, result))

    def _failed(self, name: str, reason: str, cause: Exception) -> ToolError:
        return self._environments.failed(f"{name} of {self._what} failed: {reason}", cause)

    def _thread_ended(self) -> None:
        if self._given_up:
            self._environments.change_stuck(-1)


def _offered(cls: EnvironmentClass, task: Task) -> Mapping[str, Function]:
    """The tools of the episode: all tools of the class, or only those in the task's own schemas.

    Raises ToolError: a schema names a tool that the class does not have.
    """
    if not task.tools:
        return cls.functions
    schemas = {schema["name"]: schema for schema in (tool.get("function", tool) for tool in task.tools)}
    if unknown := sorted(set(schemas) - set(cls.functions)):
        raise ToolError(f"task {task.id} offers {', '.join(unknown)}, which environment {cls.name} does not have")
    return schemas


def _defined(method: Callable[..., Any]) -> str:
    """The line that defines a method, in brackets after a space. Empty if it is unknown or not the user's."""
    function = method.func if isinstance(method, partial) else method
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({line_of_function(function)})" if code is not None and is_own(code.co_filename) else ""


def _message_of(error: Exception) -> str:
    """The text of an error, or its type if there is no text."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001 - the `__str__` of a user's exception may raise
        return type(error).__name__
