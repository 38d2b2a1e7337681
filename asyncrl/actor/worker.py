"""The rollout worker: runs the episodes of tickets, many at once, and delivers their trajectories.

Invariants: a ticket is reported as held from its arrival until its delivery was acknowledged. Every ticket ends as one
delivered trajectory or one reported failure; at a stop it is abandoned, and the replay gives it to another actor. A
worker that drains takes no further tickets, abandons those whose episodes have not begun, and delivers the others. A
failed episode never ends the worker. Evaluation tickets run before training tickets.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from asyncrl.actor.rollout_metrics import RolloutMetrics
from asyncrl.episode.images import OutgoingImages
from asyncrl.errors import AsyncrlError, StoppedError
from asyncrl.network.throttle import ErrorLogger
from asyncrl.observe.spans import NoSpans, Spans, Value
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.link import CREDITS
from asyncrl.text import cut, reason_of
from asyncrl.tools.contained import contained
from asyncrl.types import Purpose, Ticket, Trajectory

log = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_REASON = 200
"""Characters of the reason of a failure, on the timeline."""

RunEpisode = Callable[[Ticket, Callable[[], None]], Awaitable[Trajectory]]
"""Runs the episode of a ticket. It calls its second argument once the engine serves the ticket's version, and may raise
anything."""


class RolloutWorker:
    """Keeps up to `concurrency` episodes running: `active` of them run. An episode may take `limit_s` seconds from the
    time at which the engine serves its version. While all of them run, the worker's lease is renewed every `renew_s`
    seconds.

    `source` gives tickets and `sink` takes their trajectories: two clients, since each is called from its own thread.
    `spans` get each episode from the arrival of its ticket until its delivery was acknowledged. `outgoing` has the
    images that its trajectory shows.
    """

    def __init__(
        self,
        run_episode: RunEpisode,
        source: ReplayClient,
        sink: ReplayClient,
        concurrency: int,
        metrics: RolloutMetrics,
        limit_s: float = math.inf,
        renew_s: float = math.inf,
        spans: Spans | None = None,
        outgoing: OutgoingImages | None = None,
    ) -> None:
        self.active = 0
        self._outgoing = outgoing or OutgoingImages()
        self._run_episode = run_episode
        self._limit_s = limit_s
        self._source = source
        self._sink = sink
        self._concurrency = concurrency
        self._metrics = metrics
        self._renew_s = renew_s
        self._spans = spans or NoSpans()
        self._error_logger = ErrorLogger(log)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="replay")
        self._holding: set[str] = set()
        self._arrived: dict[str, float] = {}
        self._begun: set[str] = set()
        self._undelivered: set[str] = set()
        self._drains = False
        self._freed = asyncio.Event()
        self._ready: asyncio.PriorityQueue[tuple[bool, int, Ticket]] = asyncio.PriorityQueue()
        self._finished: asyncio.Queue[tuple[str, Trajectory | str, float]] = asyncio.Queue(maxsize=concurrency)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`. Then running episodes are cancelled, which releases their tools, and abandoned. All calls
        of source and sink have returned when this returns.

        Raises what source or sink raise, except StoppedError, which is a stop.
        """
        try:
            with suppress(StoppedError):
                episodes = (self._work() for _ in range(self._concurrency))
                await first_to_end(self._take_tickets(), self._deliver(), *episodes, stop.wait())
        finally:
            self._threads.shutdown()

    def drain(self) -> None:
        """Begin no further episode. Call this in the event loop of `run`."""
        self._drains = True
        while not self._ready.empty():
            self._ready.get_nowait()

    @property
    def undelivered(self) -> int:
        """How many episodes have begun that were not delivered yet."""
        return len(self._undelivered)

    async def _take_tickets(self) -> None:
        count = 0
        while True:
            self._freed.clear()
            want = 0 if self._drains else max(0, self._concurrency - self.active)
            waiting = tuple(self._holding - self._begun)
            with self._spans.span("wait for tickets", "tickets", wanted=want) as values:
                tickets = await self._in_thread(self._source.tickets, tuple(self._holding), want, waiting)
                values["tickets"] = len(tickets)
            for ticket in tickets:
                if ticket.id not in self._holding and not self._drains:
                    self._holding.add(ticket.id)
                    self._arrived[ticket.id] = self._spans.clock()
                    self.active += 1
                    count += 1
                    self._ready.put_nowait((ticket.purpose is not Purpose.EVAL, count, ticket))
            if self._drains or self.active >= self._concurrency:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), self._renew_s)

    async def _work(self) -> None:
        while True:
            _, _, ticket = await self._ready.get()
            self._spans.add("queued", self._arrived[ticket.id], self._spans.clock(), episode=ticket.id)
            outcome = await self._outcome(ticket)
            await self._finished.put((ticket.id, outcome, self._spans.clock()))
            self.active -= 1
            self._freed.set()

    async def _outcome(self, ticket: Ticket) -> Trajectory | str:
        """The trajectory of the ticket's episode, or the reason why it has none."""
        limit = asyncio.timeout(None)

        def begin() -> None:
            self._begun.add(ticket.id)
            self._undelivered.add(ticket.id)
            if not math.isinf(self._limit_s):
                limit.reschedule(asyncio.get_running_loop().time() + self._limit_s)

        try:
            async with limit:
                return await contained(partial(self._run_episode, ticket, begin))
        except Exception as error:
            if limit.expired() and not isinstance(error, AsyncrlError):
                reason = f"it took more than actor.episode_timeout_s={self._limit_s:g}"
            else:
                reason = reason_of(error)
            self._error_logger.exception(f"episode {ticket.id} failed: {reason}", error)
            return reason
        finally:
            self._begun.discard(ticket.id)

    async def _deliver(self) -> None:
        """Deliver whatever has finished since the last time, with one wait for the replay: an actor that is far from it
        would otherwise deliver one outcome a round trip."""
        while True:
            finished = [await self._finished.get()]
            while len(finished) < CREDITS and not self._finished.empty():
                finished.append(self._finished.get_nowait())
            await self._deliver_all({ticket_id: outcome for ticket_id, outcome, _ in finished})
            for ticket_id, outcome, ended in finished:
                self._record(ticket_id, outcome, ended)
                self._holding.discard(ticket_id)
                self._undelivered.discard(ticket_id)

    async def _deliver_all(self, outcomes: Mapping[str, Trajectory | str]) -> None:
        """Return once the replay has the outcome of each ticket."""
        trajectories = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Trajectory)}
        failures = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
        failed = len(failures)
        images: dict[bytes, bytes] = {}
        for name in outcomes:
            images |= self._outgoing.take(name)
        answers = await self._in_thread(self._sink.put_all, list(trajectories.values()), images)
        for (name, trajectory), answer in zip(trajectories.items(), answers, strict=True):
            if isinstance(answer, str):
                self._metrics.delivered(trajectory)
            else:
                self._error_logger.exception(f"the outcome of {name} was refused: {answer}", answer)
                self._metrics.refused()
                failures[name] = f"refused: {answer}"
        if failures:
            await self._in_thread(self._sink.fail_all, failures)
        self._metrics.failed(failed)

    def _record(self, ticket_id: str, outcome: Trajectory | str, ended: float) -> None:
        now = self._spans.clock()
        self._spans.add("deliver", ended, now, episode=ticket_id)
        values: dict[str, Value] = (
            {"failed": cut(outcome, LONGEST_REASON)}
            if isinstance(outcome, str)
            else {
                "task": outcome.task_id,
                "group": outcome.group_id,
                "tokens": len(outcome),
                "sampled": outcome.sampled_tokens,
                "finish": outcome.finish,
                "oldest_version": outcome.oldest_version,
            }
        )
        self._spans.add("episode", self._arrived.pop(ticket_id), now, episode=ticket_id, **values)

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        """Call in a thread of our own: tools may keep the shared threads busy for longer than a lease lasts."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)


async def first_to_end(*works: Awaitable[object]) -> None:
    """Run all until one ends. Raises its error, if any, when the others have ended too."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
