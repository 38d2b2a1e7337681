"""The rollout worker: runs the episodes of tickets, many at once, and delivers their trajectories.

Invariants: a ticket is reported as held from its arrival until its delivery was acknowledged. Every ticket ends as one
delivered trajectory or one reported failure; at a stop it is abandoned, and the replay gives it to another actor. A
failed episode never ends the worker. Evaluation tickets run before training tickets.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from asyncrl.actor.rollout_metrics import RolloutMetrics
from asyncrl.errors import AsyncrlError, RefusedError, StoppedError, WireError
from asyncrl.text import reason_of
from asyncrl.types import Purpose, Ticket, Trajectory

log = logging.getLogger(__name__)

T = TypeVar("T")


class TicketSource(Protocol):
    """Where tickets come from; called from one thread."""

    def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str]) -> list[Ticket]:
        """Up to `want` tickets. Waits about a second for the first, or not at all if `want` is 0. Renews the leases of
        `holding`; any other ticket of this actor is sent again. The tickets in `waiting`, which are also in `holding`,
        wait for a policy version: this time does not count as their episodes'. Retries by itself."""
        ...


class ResultSink(Protocol):
    """Where episodes are delivered; called from one thread, but not from the source's. Calls retry by themselves."""

    def put(self, trajectory: Trajectory) -> object:
        """Returns once the trajectory is durable. Raises RefusedError; WireError: it cannot be sent."""
        ...

    def fail(self, ticket_id: str, reason: str) -> object:
        """Gives the ticket back with the reason."""
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    """An episode that has no trajectory; the id is its ticket's."""

    id: str
    reason: str


class RunEpisode(Protocol):
    """Runs the episode of a ticket. It calls `begin` once the engine serves the ticket's version, and may raise
    anything."""

    async def __call__(self, ticket: Ticket, begin: Callable[[], None]) -> Trajectory: ...


class RolloutWorker:
    """Keeps up to `concurrency` episodes running. `run_episode` is awaited once a ticket, and may take `limit_s`
    seconds after it called `begin`. Leases are renewed every `renew_s` seconds, at the latest."""

    def __init__(
        self,
        run_episode: RunEpisode,
        source: TicketSource,
        sink: ResultSink,
        concurrency: int,
        metrics: RolloutMetrics,
        limit_s: float = math.inf,
        renew_s: float = 2.0,
    ) -> None:
        self._run_episode = run_episode
        self._limit_s = limit_s
        self._source = source
        self._sink = sink
        self._concurrency = concurrency
        self._metrics = metrics
        self._renew_s = renew_s
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="replay")
        self._holding: set[str] = set()
        self._begun: set[str] = set()
        self._active = 0
        self._freed = asyncio.Event()
        self._ready: asyncio.PriorityQueue[tuple[bool, int, Ticket]] = asyncio.PriorityQueue()
        self._finished: asyncio.Queue[Trajectory | Failure] = asyncio.Queue(maxsize=concurrency)

    @property
    def active(self) -> int:
        """The number of running episodes."""
        return self._active

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`. Then running episodes are cancelled, which releases their tools, and abandoned. All calls
        of source and sink have returned when this returns.

        Raises what source or sink raise, except StoppedError, which is a stop.
        """
        work = [self._take_tickets(), self._deliver(), *(self._work() for _ in range(self._concurrency))]
        tasks = [asyncio.create_task(each) for each in (*work, stop.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._threads.shutdown()
        for task in done:
            with suppress(StoppedError):
                task.result()

    async def _take_tickets(self) -> None:
        count = 0
        while True:
            self._freed.clear()
            want = max(0, self._concurrency - self._active)
            waiting = tuple(self._holding - self._begun)
            for ticket in await self._in_thread(self._source.tickets, tuple(self._holding), want, waiting):
                if ticket.id not in self._holding:
                    self._holding.add(ticket.id)
                    self._active += 1
                    count += 1
                    self._ready.put_nowait((ticket.purpose is not Purpose.EVAL, count, ticket))
            if self._active >= self._concurrency:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), self._renew_s)

    async def _work(self) -> None:
        while True:
            _, _, ticket = await self._ready.get()
            outcome = await self._outcome(ticket)
            await self._finished.put(outcome)
            self._active -= 1
            self._freed.set()

    async def _outcome(self, ticket: Ticket) -> Trajectory | Failure:
        limit = asyncio.timeout(None)

        def begin() -> None:
            self._begun.add(ticket.id)
            if not math.isinf(self._limit_s):
                limit.reschedule(asyncio.get_running_loop().time() + self._limit_s)

        try:
            async with limit:
                return await self._run_episode(ticket, begin)
        except AsyncrlError as error:
            log.warning("episode %s failed: %s", ticket.id, error)
            return Failure(ticket.id, reason_of(error))
        except Exception as error:
            if limit.expired():
                log.warning("episode %s was stopped after %.0f s", ticket.id, self._limit_s)
                return Failure(ticket.id, f"it took more than actor.episode_timeout_s={self._limit_s:g}")
            log.exception("episode %s failed", ticket.id)
            return Failure(ticket.id, reason_of(error))
        finally:
            self._begun.discard(ticket.id)

    async def _deliver(self) -> None:
        while True:
            outcome = await self._finished.get()
            try:
                await self._in_thread(self._send, outcome)
            except (RefusedError, WireError) as error:
                log.error("the outcome of %s was refused: %s", outcome.id, error)
                self._metrics.refused()
                await self._in_thread(self._sink.fail, outcome.id, f"refused: {error}")
            else:
                if isinstance(outcome, Failure):
                    self._metrics.failed()
                else:
                    self._metrics.delivered(outcome)
            self._holding.discard(outcome.id)

    def _send(self, outcome: Trajectory | Failure) -> None:
        if isinstance(outcome, Failure):
            self._sink.fail(outcome.id, outcome.reason)
        else:
            self._sink.put(outcome)

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        """Call in a thread of our own: tools may keep the shared threads busy for longer than a lease lasts."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
