"""Opens the simulated user of each episode, and calls the user's methods.

A task chooses its user by `extra_info.interaction_kwargs.name`; a task without `interaction_kwargs` has no user. A user
that was started for an episode is finalized exactly once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any, NamedTuple, TypeVar

from asyncrl.errors import InteractionError
from asyncrl.machine.finishing import finish
from asyncrl.network.throttle import ErrorLogger
from asyncrl.plain import copied
from asyncrl.text import reason_of, short_repr
from asyncrl.tools.contained import contained
from asyncrl.tools.interactions.base import Interaction
from asyncrl.tools.results import Content, cut_content, read_content
from asyncrl.types import LARGEST_FLOAT32, Ticket

log = logging.getLogger(__name__)

T = TypeVar("T")

KWARGS = "interaction_kwargs"
"""The field of a task's `extra_info` that has the name and the arguments of the task's user."""


@dataclass(frozen=True, slots=True)
class InteractionLimits:
    """Limits of a user in one episode.

    - `timeout_s`: how many seconds a call may take
    - `max_messages`: how many messages the user may send; None: no limit
    - `max_chars`: how many characters of a message the policy reads at most
    """

    timeout_s: float = 60.0
    max_messages: int | None = None
    max_chars: int = 4096


@dataclass(slots=True)
class InteractionCounts:
    """Counts since the actor started.

    - `responses`: all responses of users
    - `ended`: responses that ended the conversation
    - `failures`: failed calls
    """

    responses: int = 0
    ended: int = 0
    failures: int = 0


class UserReply(NamedTuple):
    """A user's reply to the policy's turn: whether the conversation `ends`, the message, and the turn's score."""

    ends: bool
    content: Content
    score: float | None


class Interactions:
    """Opens the users on offer, by name, for episodes."""

    def __init__(self, users: Mapping[str, Interaction], limits: InteractionLimits) -> None:
        self._users = users
        self._limits = limits
        self.counts = InteractionCounts()
        self._error_logger = ErrorLogger(log)

    @asynccontextmanager
    async def open(self, ticket: Ticket) -> AsyncIterator[OpenInteraction | None]:
        """Open the user of one episode. None if its task names no user, or if no users are on offer.

        Raises InteractionError: the task's user is not on offer, or failed to start.
        """
        kwargs = ticket.task.extra_info.get(KWARGS)
        if not kwargs or not self._users:
            yield None
            return
        name = str(kwargs.get("name")) if isinstance(kwargs, Mapping) else ""
        if name not in self._users:
            raise InteractionError(
                f"task {ticket.task.id} has extra_info.{KWARGS}.name={name!r:.100}; actor.interactions has "
                f"{', '.join(self._users)}"
            )
        calls = _Calls(self._limits.timeout_s, self.counts, self._error_logger)
        opened = OpenInteraction(self._users[name], ticket.id, kwargs, self._limits, calls)
        try:
            await opened.start()
            yield opened
        finally:
            await finish(opened.finalize())


class _Calls:
    """Calls users' methods within their time limit, and reports the calls that fail."""

    def __init__(self, timeout_s: float, counts: InteractionCounts, error_logger: ErrorLogger) -> None:
        self.counts = counts
        self._timeout_s = timeout_s
        self._error_logger = error_logger

    async def __call__(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Wait for the result of `call`. Raises InteractionError, which names `what`: `call` raised or was too slow."""
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await contained(call)
        except Exception as error:
            reason = reason_of(error)
            if limit.expired():
                reason = f"it took more than actor.interaction_timeout_s={self._timeout_s:g}"
            raise self.failed(f"{what} failed: {reason}", error) from error

    def failed(self, reason: str, cause: Exception | None = None) -> InteractionError:
        """Count and log a failure, and return it as an error to raise."""
        error = InteractionError(reason)
        self.counts.failures += 1
        self._error_logger.exception(reason, cause or error)
        return error


class OpenInteraction:
    """The user `interaction` in the episode `instance_id`. `kwargs` are the task's arguments for the user."""

    def __init__(
        self,
        interaction: Interaction,
        instance_id: str,
        kwargs: Mapping[str, Any],
        limits: InteractionLimits,
        calls: _Calls,
    ) -> None:
        self._interaction = interaction
        self._id = instance_id
        self._kwargs = kwargs
        self._limits = limits
        self._calls = calls
        self._what = f"the simulated user {interaction.name}"
        self._responses = 0

    @property
    def may_go_on(self) -> bool:
        """True if the policy may read the user's last response. False if this would exceed the limit of messages."""
        return self._limits.max_messages is None or self._responses <= self._limits.max_messages

    async def start(self) -> None:
        """Begin the user's episode. Raises InteractionError: the user failed."""
        kwargs = copied(dict(self._kwargs))
        await self._call("start_interaction", lambda user: user.start_interaction(self._id, **kwargs))

    async def respond(self, messages: Sequence[Mapping[str, Any]]) -> UserReply:
        """Get the user's response to the policy's turn, the last of `messages`. Raises InteractionError: the user
        failed."""
        given, kwargs = copied(([dict(message) for message in messages], dict(self._kwargs)))
        result = await self._call("generate_response", lambda user: user.generate_response(self._id, given, **kwargs))
        reply = self._read(result)
        if reply.score is None:
            score = await self._call("calculate_score", lambda user: user.calculate_score(self._id))
            if not _is_score(score):
                raise self._calls.failed(
                    f"calculate_score of {self._what} gave {short_repr(score)}; it must return None, or a finite "
                    "number in the range of float32"
                )
            reply = reply._replace(score=None if score is None else float(score))
        self._responses += 1
        self._calls.counts.responses += 1
        self._calls.counts.ended += reply.ends
        return reply

    async def finalize(self) -> None:
        """End the user's episode. Never raises, so that the episode keeps its outcome."""
        try:
            await self._call("finalize_interaction", lambda user: user.finalize_interaction(self._id))
        except InteractionError:
            log.debug("%s was not finalized; the error was logged and counted", self._what)

    async def _call(self, name: str, call: Callable[[Interaction], Awaitable[T]]) -> T:
        return await self._calls(f"{name} of {self._what}", lambda: call(self._interaction))

    def _read(self, result: Any) -> UserReply:
        """Read a response. Raises InteractionError: the response is not valid."""
        match result:
            case (ends, message, score, *_) if _is_yes_or_no(ends) and _is_score(score):
                if (content := self._content(message)) is not None:
                    content = cut_content(content, self._limits.max_chars)
                    return UserReply(bool(ends), content, None if score is None else float(score))
        raise self._calls.failed(
            f"{self._what} gave {short_repr(result)}; generate_response must return (ends, message, score, data): "
            "message is a text or a list of texts and images, and score is None or a finite number in the range of "
            "float32"
        )

    def _content(self, message: Any) -> Content | None:
        """Read a message. Raises InteractionError: an image cannot be saved."""
        try:
            return read_content(message)
        except (ValueError, TypeError, OSError) as error:
            raise self._calls.failed(f"{self._what} gave an image that cannot be saved: {error}", error) from error


def _is_score(value: Any) -> bool:
    # A comparison with nan is false, so this also refuses nan. `inf` is checked separately: for a comparison with a
    # float16 of numpy, LARGEST_FLOAT32 becomes infinite.
    if not isinstance(value, Real):
        return value is None
    size: Any = abs(value)
    return bool(size < inf and size <= LARGEST_FLOAT32)


def _is_yes_or_no(value: Any) -> bool:
    """True if `value` has a truth value. An array of several elements has none."""
    try:
        bool(value)
    except Exception:  # noqa: BLE001 - the caller refuses it
        return False
    return True
