"""Opens the sessions of one MCP server for the tools of all episodes.

A server that keeps state has a session for each episode, which begins with the episode's first call. If a session is
lost after it has answered a call, the episode fails, since another session would answer from another state. A `shared`
server has one session for all episodes, which is reopened when it is lost.

After a failure, the next start of a session is delayed. The delay grows with each further failure. Once a call is
answered, the next failure causes the shortest delay again. Only a few sessions start at once, since a program may take
seconds of processor time to start.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.machine.finishing import finish
from asyncrl.tools.base import StateLostError, ToolRefusal
from asyncrl.tools.mcp.results import result_content, text_of
from asyncrl.tools.mcp.session import Link, Session, SessionError
from asyncrl.tools.mcp.settings import McpServer
from asyncrl.tools.results import Content

STARTS_AT_ONCE = 4
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 30.0

EMPTY = "(no output)"


@dataclass(slots=True)
class McpCounts:
    """Counts since the actor started, except `sessions`, the number of open sessions.

    - `started`: sessions that started. `start_failures`: starts that failed.
    - `lost`: sessions that were lost. `states_lost`: how many of these had the state of an episode.
    - `errors`: calls that the server answered with an error.
    - `unshown`: parts of results that the policy does not see, such as images.
    """

    sessions: int = 0
    started: int = 0
    start_failures: int = 0
    lost: int = 0
    states_lost: int = 0
    errors: int = 0
    unshown: int = 0


def link_to(server: McpServer) -> Link:
    """Make a link to the server. Raises ConfigError: an environment variable is missing."""
    if server.url is not None:
        from asyncrl.tools.mcp.http import UrlLink

        return UrlLink(server.url, server.filled(server.headers, os.environ))
    from asyncrl.tools.mcp.stdio import ProgramLink

    return ProgramLink(server.command, server.filled(server.env, os.environ), server.cwd)


class McpService:
    """The sessions of `server`. `shows_images` is true if the policy sees images. `clock` returns the time in
    seconds."""

    def __init__(
        self, server: McpServer, shows_images: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = server.name
        self.server = server
        self.shows_images = shows_images
        self.counts = McpCounts()
        self._clock = clock
        self._slots = asyncio.Semaphore(server.sessions)
        self._starting = asyncio.Semaphore(STARTS_AT_ONCE)
        self._failures = 0
        self._not_before = 0.0
        self._for_all = _EpisodeSession(self)

    def counters(self) -> Mapping[str, float]:
        return {f"mcp_{name}": count for name, count in asdict(self.counts).items()}

    @asynccontextmanager
    async def session(self) -> AsyncIterator[_EpisodeSession]:
        """Open the session of one episode, which begins with the first call."""
        if self.server.shared:
            yield self._for_all
            return
        async with self._slots:
            session = _EpisodeSession(self)
            try:
                yield session
            finally:
                await finish(session.close())

    async def close(self) -> None:
        await self._for_all.close()

    async def open(self) -> Session:
        """Wait for the delay that earlier failures have caused, and open a new session. Raises SessionError: it cannot
        be opened."""
        async with self._starting:
            if (wait_s := self._not_before - self._clock()) > 0:
                await asyncio.sleep(wait_s)
            try:
                session = await Session.open(link_to(self.server), self.server)
            except SessionError:
                self.counts.start_failures += 1
                self._failed()
                raise
        self.counts.started += 1
        self.counts.sessions += 1
        return session

    def lost(self) -> None:
        """Count a lost session."""
        self.counts.lost += 1
        self._failed()

    def succeeded(self) -> None:
        """Give the next failure the shortest delay again, because a call was answered."""
        self._failures = 0

    def _failed(self) -> None:
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(self._failures, 16))
        self._failures += 1
        self._not_before = self._clock() + wait_s


class _EpisodeSession:
    """The session of an episode, or of all episodes of a `shared` server. The first call opens it."""

    def __init__(self, service: McpService) -> None:
        self._service = service
        self._opening: asyncio.Task[Session] | None = None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call a tool. Returns the content that the policy reads.

        Raises ToolRefusal: the server answered with an error; SessionError, AnswerError: the call failed, and may be
        retried; StateLostError: the session that had the episode's state is lost.
        """
        counts = self._service.counts
        session = await self._opened()
        try:
            result = await session.call(name, arguments)
        except ToolRefusal:
            counts.errors += 1
            self._service.succeeded()
            raise
        except SessionError as error:
            self._give_up(session)
            if session.answered and not self._service.server.shared:
                counts.states_lost += 1
                raise StateLostError(f"the session with MCP server {self._service.name} was lost: {error}") from error
            raise
        self._service.succeeded()
        content, unshown = result_content(result, self._service.shows_images)
        counts.unshown += unshown
        if result.is_error:
            counts.errors += 1
            raise ToolRefusal(text_of(content) or "Error: the tool failed and did not say why.")
        return content or EMPTY

    async def close(self) -> None:
        opening, self._opening = self._opening, None
        if opening is None:
            return
        opening.cancel()
        await asyncio.wait({opening})
        if (session := _opened_by(opening)) is not None:
            self._service.counts.sessions -= 1
            await session.close()

    async def _opened(self) -> Session:
        """The session, once it has started. Concurrent calls wait for the same start. Raises SessionError: the session
        cannot be opened."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._service.open())
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except Exception:
            if self._opening is opening:
                self._opening = None
            raise

    def _give_up(self, session: Session) -> None:
        """Count a lost session once, even if several calls report it."""
        if self._opening is not None and _opened_by(self._opening) is session:
            self._opening = None
            self._service.counts.sessions -= 1
            self._service.lost()


def _opened_by(opening: asyncio.Task[Session]) -> Session | None:
    if not opening.done() or opening.cancelled() or opening.exception() is not None:
        return None
    return opening.result()
