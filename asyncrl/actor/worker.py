"""One actor: turns tickets into trajectories, many at once, and delivers them.

What must hold: a ticket's id is reported as held from its arrival until its delivery was acknowledged; every ticket
ends as one delivered trajectory or one reported failure, or is abandoned at a stop, after which the replay gives it to
another. A failed episode never ends the worker. Evaluation tickets run before training tickets.
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
        """Up to `want` tickets, waiting about a second for the first; with `want` 0 it answers at once. The call
        renews the leases of `holding`; any other ticket that was given to this actor is given again. The time of those
        in `waiting`, a part of `holding`, is not counted as their episodes'. It retries by itself."""
        ...


class ResultSink(Protocol):
    """Where episodes are delivered; called from one thread, which is not the source's. Calls retry by themselves."""

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
    """Plays a ticket's episode. It calls `begin` once the engine serves its version, and may raise anything."""

    async def __call__(self, ticket: Ticket, begin: Callable[[], None]) -> Trajectory: ...


class RolloutWorker:
    """Keeps up to `concurrency` episodes running. `run_episode` is awaited once a ticket, for `limit_s` seconds at
    most after its `begin`: a version that the engine has yet to get is not waited for on the episode's time."""

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
        """Episodes at work now."""
        return self._active

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`; running episodes are then cancelled, which releases their tools, and abandoned. No call of
        source or sink is at work any more when it returns.

        Raises what source or sink raise: without them there is no work. StoppedError is a stop.
        """
        loops = [self._take_tickets(), self._deliver()]
        tasks = [asyncio.create_task(loop) for loop in (*loops, *(self._work() for _ in range(self._concurrency)))]
        tasks.append(asyncio.create_task(_until(stop)))
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
                log.warning("episode %s was given up after %.0f s", ticket.id, self._limit_s)
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
                self._count(outcome)
            self._holding.discard(outcome.id)

    def _send(self, outcome: Trajectory | Failure) -> None:
        if isinstance(outcome, Failure):
            self._sink.fail(outcome.id, outcome.reason)
        else:
            self._sink.put(outcome)

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        """In a thread of our own: tools may keep the shared ones busy for longer than a lease lasts."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    def _count(self, outcome: Trajectory | Failure) -> None:
        if isinstance(outcome, Failure):
            self._metrics.failed()
        else:
            self._metrics.delivered(outcome)


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()
