"""Serves agents that connect: they request episodes over HTTP, play them, and report their results.

    POST /sessions               with the sessions' key: returns an episode, with its address, its key and its task
    POST /sessions/ID/reward     with the episode's key: sets rewards, metrics and turns; a repetition replaces them
    POST /sessions/ID/end        with the episode's key: ends the episode; it has failed if the body has `error`

A session fails if its agent sends no request for `actor.session_timeout_s` seconds. Then its episode is played again in
another session. Once a session has ended, or its actor has died, requests with the session's key are refused. Its agent
must request a new session.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from asyncrl.agents.chat_api.result import AgentError, AgentResult, error_in, read_result, task_body
from asyncrl.agents.chat_api.waiting import WaitingAgent
from asyncrl.errors import AsyncrlError, RefusedError
from asyncrl.types import Task

MAX_WAIT_S = 60.0
"""The maximum seconds that a request waits for an episode. After that, the agent may send the request again."""

STALE = 64
"""Ended sessions are removed from the queue once the queue is longer than 2 * (number of live sessions) + STALE."""


class SessionOverError(AsyncrlError):
    """The session has ended, so the result was not recorded."""


@dataclass(slots=True)
class SessionCounts:
    """Counts since the actor started.

    - `started`: sessions that agents took; `failed`: sessions that agents reported as failed; `silent`: sessions that
      timed out.
    - `refused`: refused results.
    """

    started: int = 0
    failed: int = 0
    silent: int = 0
    refused: int = 0


@dataclass(eq=False)
class AgentSession:
    """An episode for an agent that connects. `taken` is true once an agent plays the episode. `begin` is called when
    the agent gets the episode.

    `heard` is the time of the agent's last request, in seconds of the event loop's clock. `in_flight` is the number of
    the agent's unanswered requests.
    """

    id: str
    task: Mapping[str, Any]
    api_key: str
    over: asyncio.Future[AgentResult]
    begin: Callable[[], None]
    result: AgentResult = field(default_factory=AgentResult)
    taken: bool = False
    heard: float = 0.0
    in_flight: int = 0

    def describe(self, base: str) -> dict[str, Any]:
        """The session as JSON for its agent. `base` is the address at which the agent reaches the server."""
        id = quote(self.id, safe="")
        return {"id": id, "base_url": f"{base}/{id}/v1", "api_key": self.api_key, "task": self.task}


class Sessions(WaitingAgent):
    """Lets agents that connect with `key` play episodes.

    An episode waits until an agent requests it, and fails after `longest_wait_s` seconds. Once an agent has it, the
    episode fails if `timeout_s` seconds pass without a request from its agent. Call all methods in one event loop.
    """

    def __init__(self, key: str, timeout_s: float, longest_wait_s: float = math.inf) -> None:
        self.counts = SessionCounts()
        self._key = key.encode()
        self._timeout_s = timeout_s
        self._longest_wait_s = longest_wait_s
        self._sessions: dict[str, AgentSession] = {}
        self._waiting: asyncio.Queue[AgentSession] = asyncio.Queue()

    def counters(self) -> Mapping[str, float]:
        """Counts since the actor started, and the number of sessions that wait for an agent now."""
        counts = {f"agent_sessions_{name}": count for name, count in asdict(self.counts).items()}
        return {**counts, "agent_sessions_waiting": sum(not each.taken for each in self._sessions.values())}

    async def wait_and_play(self, task: Task, base_url: str, api_key: str, begin: Callable[[], None]) -> AgentResult:
        """Wait until an agent has played the episode. Raises AgentError: the episode failed or timed out."""
        loop = asyncio.get_running_loop()
        id = unquote(base_url.removesuffix("/v1").rpartition("/")[2])
        session = self._sessions[id] = AgentSession(id, task_body(task), api_key, loop.create_future(), begin)
        self._waiting.put_nowait(session)
        queued = loop.time()
        try:
            while not session.over.done():
                if not session.taken and loop.time() - queued >= self._longest_wait_s:
                    raise AgentError(f"no agent requested it for actor.episode_timeout_s={self._longest_wait_s:g}")
                quiet_s = loop.time() - session.heard if session.taken and not session.in_flight else 0.0
                if quiet_s >= self._timeout_s:
                    self.counts.silent += 1
                    raise AgentError(
                        f"the session's agent sent no request for actor.session_timeout_s={self._timeout_s:g}"
                    )
                await asyncio.wait([session.over], timeout=min(self._timeout_s - quiet_s, self._longest_wait_s))
            return session.over.result()
        finally:
            del self._sessions[id]
            session.over.cancel()
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Remove ended sessions from the queue, which would otherwise grow while no agent requests a session."""
        if self._waiting.qsize() <= 2 * len(self._sessions) + STALE:
            return
        for _ in range(self._waiting.qsize()):
            if not (session := self._waiting.get_nowait()).over.done():
                self._waiting.put_nowait(session)

    def permits(self, key: str) -> bool:
        """True if this is the key with which agents request episodes."""
        return secrets.compare_digest(key.encode(errors="surrogateescape"), self._key)

    async def take(self, wait_s: float) -> AgentSession | None:
        """Take the next waiting episode. None if no episode is ready within `wait_s` seconds."""
        try:
            async with asyncio.timeout(min(wait_s, MAX_WAIT_S)):
                while (session := await self._waiting.get()).over.done():
                    continue
        except TimeoutError:
            return None
        session.taken = True
        self.heard(session)
        self.counts.started += 1
        return session

    def give_back(self, session: AgentSession) -> None:
        """Return a session to the queue: the agent that requested it has disconnected."""
        session.taken = False
        self.counts.started -= 1
        self._waiting.put_nowait(session)

    def heard(self, session: AgentSession) -> None:
        """Record that the agent has sent a request now."""
        session.heard = asyncio.get_running_loop().time()

    @contextmanager
    def at_work(self, id: str) -> Iterator[None]:
        """Prevent the session's timeout while the body of the `with` statement answers a request of its agent."""
        session = self._sessions.get(id)
        if session is None:
            yield
            return
        session.in_flight += 1
        try:
            yield
        finally:
            session.in_flight -= 1
            self.heard(session)

    def find(self, id: str, key: str) -> AgentSession | None:
        """The session `id`; None if no agent plays it, or if `key` is not its key."""
        session = self._sessions.get(id)
        if session is None or not session.taken:
            return None
        fits = secrets.compare_digest(key.encode(errors="surrogateescape"), session.api_key.encode())
        return session if fits else None

    def reward(self, session: AgentSession, body: object) -> None:
        """Keep the result of an agent. Raises RefusedError: the result is malformed; SessionOverError: the session has
        ended."""
        _check_runs(session)
        try:
            session.result = read_result(body)
        except AgentError as error:
            self.counts.refused += 1
            raise RefusedError(str(error)) from error

    def end(self, session: AgentSession, body: object) -> None:
        """End a session. Raises RefusedError: the body has other fields than `error`; SessionOverError: the session has
        ended already."""
        _check_runs(session)
        if not isinstance(body, dict) or body.keys() - {"error"}:
            self.counts.refused += 1
            raise RefusedError("the body may have only the field error; send rewards to /reward")
        if (reason := error_in(body)) is not None:
            self.counts.failed += 1
            session.over.set_exception(AgentError(f"the agent reports: {reason}"))
        else:
            session.over.set_result(session.result)


def _check_runs(session: AgentSession) -> None:
    """Raises SessionOverError: the session has ended, perhaps while the server still read the body of this request."""
    if session.over.done():
        raise SessionOverError("the session is over")
