"""Opens the Python sessions of an actor's episodes, and bounds the sum of their memory limits.

The session of an episode begins with the episode's first call. This call first waits until the memory limit of the
session fits into the bound, together with those of all other sessions. The session ends with the episode.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Protocol

from asyncrl.machine.finishing import finish
from asyncrl.sandbox.sandbox import ProgramResult, SandboxError, SandboxLimits
from asyncrl.tools.base import StateLostError


class Cells(Protocol):
    """An interpreter that runs cells: an `Interpreter`, or one in a container."""

    async def run(self, code: str, wall_s: float) -> ProgramResult: ...

    async def close(self) -> None: ...


Start = Callable[[SandboxLimits], Awaitable[Cells]]
"""Starts a session. Raises SandboxError: it cannot be started."""


@dataclass(slots=True)
class InterpreterCounts:
    """Counts since the actor started, except the current numbers of `open` sessions and of episodes `waiting` for
    memory.

    - `started`: sessions that started. `start_failures`: starts that failed.
    - `late`: calls that took too long. `ended`: calls whose program ended the session.
    - `ran_in_pause`: sessions that were ended because one of their processes ran between two calls.
    - `states_lost`: sessions that a failure of the sandbox ended. The state of their episode was lost with them.
    """

    open: int = 0
    waiting: int = 0
    started: int = 0
    start_failures: int = 0
    late: int = 0
    ended: int = 0
    ran_in_pause: int = 0
    states_lost: int = 0


class MemoryBudget:
    """Grants megabytes of `total_mb` to sessions, in the order in which they ask."""

    def __init__(self, total_mb: int) -> None:
        self.total_mb = total_mb
        self._free_mb = total_mb
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size_mb: int) -> None:
        """Wait until `size_mb` are free, and take them. `size_mb` must not exceed `total_mb`."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_mb, admitted))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.give(size_mb)
            else:
                with suppress(ValueError):
                    self._waiting.remove((size_mb, admitted))
                self._admit()
            raise

    def give(self, size_mb: int) -> None:
        """Give back `size_mb`."""
        self._free_mb += size_mb
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free_mb:
            size_mb, admitted = self._waiting.popleft()
            # A task that was cancelled in this iteration of the event loop is still in the queue.
            if not admitted.cancelled():
                self._free_mb -= size_mb
                admitted.set_result(None)


class SessionService:
    """The sessions of all episodes. `start` opens a session, and `stop` ends the process that opens them."""

    name = "python sessions"

    def __init__(self, start: Start, stop: Callable[[], None], total_mb: int) -> None:
        self.counts = InterpreterCounts()
        self.budget = MemoryBudget(total_mb)
        self.start = start
        self._stop = stop

    def counters(self) -> Mapping[str, float]:
        return {f"python_{name}": count for name, count in asdict(self.counts).items()}

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EpisodeSession]:
        session = EpisodeSession(self)
        try:
            yield session
        finally:
            await finish(session.close())

    async def close(self) -> None:
        await asyncio.to_thread(self._stop)


class EpisodeSession:
    """The session of one episode. If a call ends it, the next call begins another one."""

    def __init__(self, service: SessionService) -> None:
        self._service = service
        self._one_at_a_time = asyncio.Lock()
        self._session: Cells | None = None
        self._held_mb = 0
        self._has_state = False

    async def run(self, code: str, limits: SandboxLimits) -> ProgramResult:
        """Run a cell. The status is 0 if the session continues.

        Raises SandboxError: the call failed, and may be retried; StateLostError: the session had a state, which is
        lost.
        """
        async with self._one_at_a_time:
            session = self._session or await self._begin(limits)
            try:
                ran = await session.run(code, limits.wall_s)
            except SandboxError as error:
                self._forget()
                if not self._has_state:
                    raise
                self._service.counts.states_lost += 1
                raise StateLostError(f"the session was lost: {error}") from error
            self._has_state = ran.status == 0
            if not self._has_state:
                self._forget()
                counts = self._service.counts
                counts.late += ran.status is None
                counts.ran_in_pause += bool(ran.reason)
                counts.ended += ran.status is not None and not ran.reason
            return ran

    async def close(self) -> None:
        session = self._session
        try:
            if session is not None:
                self._forget()
                await session.close()
        finally:
            self._service.budget.give(self._held_mb)
            self._held_mb = 0

    async def _begin(self, limits: SandboxLimits) -> Cells:
        counts = self._service.counts
        if not self._held_mb:
            counts.waiting += 1
            try:
                await self._service.budget.take(limits.memory_mb)
            finally:
                counts.waiting -= 1
            self._held_mb = limits.memory_mb
        try:
            self._session = await self._service.start(limits)
        except SandboxError:
            counts.start_failures += 1
            raise
        self._has_state = False
        counts.started += 1
        counts.open += 1
        return self._session

    def _forget(self) -> None:
        self._session = None
        self._service.counts.open -= 1
