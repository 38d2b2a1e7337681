"""The rollout worker: takes tickets (each permits one episode), plays many episodes at once, and delivers the outcomes.

The worker reports a ticket as held from its arrival until the replay has acknowledged the outcome. Every ticket ends as
one delivered trajectory or one reported failure, unless the worker stops: then the replay gives the ticket to another
actor. A failed episode never ends the worker.

Back-pressure: the worker requests at most one ticket for each free slot, and an episode that has ended keeps its slot
until the queue of outcomes has room.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from asyncrl.actor.delivery import Delivery, EpisodeOutcome
from asyncrl.actor.held_tickets import HeldTickets
from asyncrl.actor.rollout_metrics import RolloutMetrics
from asyncrl.episode.images import OutgoingImages
from asyncrl.errors import AsyncrlError, StoppedError
from asyncrl.network.throttle import ErrorLogger
from asyncrl.observe.spans import NoSpans, Spans, Value
from asyncrl.replay.client.client import ReplayClient
from asyncrl.replay.client.link import CREDITS
from asyncrl.text import cut, reason_of
from asyncrl.tools.contained import contained
from asyncrl.types import Purpose, Ticket, Trajectory

log = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_REASON = 200
"""The maximum number of characters of a failure's reason that the timeline shows."""

RunEpisode = Callable[[Ticket, Callable[[], None]], Awaitable[Trajectory]]
"""Runs the episode of a ticket, and calls its second argument when the engine serves the ticket's version.

The function may raise any error.
"""


class RolloutWorker:
    """Keeps up to `concurrency` episodes running; `active` is the number of tickets that have no outcome yet.

    An episode may take `limit_s` seconds from the time at which the engine serves the version of its ticket. While no
    slot is free, the worker renews its leases every `renew_s` seconds.

    `source` gives tickets and `sink` takes outcomes. They are two clients, since each is called from its own thread.
    `spans` records each episode, from the arrival of its ticket until the replay has acknowledged the outcome.
    `outgoing` has the images that the trajectories show.
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
        self._run_episode = run_episode
        self._source = source
        self._concurrency = concurrency
        self._limit_s = limit_s
        self._renew_s = renew_s
        self._spans = spans or NoSpans()
        self._error_logger = ErrorLogger(log)
        # These are not the default threads of the event loop: tools may keep those busy for longer than a lease lasts.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="replay")
        self._delivery = Delivery(sink, metrics, outgoing or OutgoingImages(), self._in_thread)
        self._held = HeldTickets()
        self._drains = False
        self._slot_is_free = asyncio.Event()
        self._ready: asyncio.PriorityQueue[tuple[bool, int, Ticket]] = asyncio.PriorityQueue()
        self._finished: asyncio.Queue[tuple[str, EpisodeOutcome, float]] = asyncio.Queue(maxsize=concurrency)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`. Then cancel the running episodes, which releases their tools, and abandon their tickets.

        All calls of source and sink have returned when this returns. Raises the exceptions of these calls, except
        StoppedError, which ends the work as `stop` does.
        """
        try:
            with suppress(StoppedError):
                players = (self._play_episodes() for _ in range(self._concurrency))
                await first_to_end(self._take_tickets(), *players, self._deliver_outcomes(), stop.wait())
        finally:
            self._threads.shutdown()

    def drain(self) -> None:
        """Take no more tickets, abandon the tickets whose episodes have not begun, and deliver the other episodes.

        Call this in the event loop of `run`.
        """
        self._drains = True
        while not self._ready.empty():
            self._ready.get_nowait()

    @property
    def undelivered(self) -> int:
        """The number of episodes that have begun and were not delivered yet."""
        return self._held.undelivered

    async def _take_tickets(self) -> None:
        """Request a ticket for each free slot. If no slot is free, wait for one, and renew the leases meanwhile."""
        count = 0
        while True:
            self._slot_is_free.clear()
            want = 0 if self._drains else max(0, self._concurrency - self.active)
            waiting = self._held.waiting
            with self._spans.span("wait for tickets", "tickets", wanted=want) as values:
                tickets = await self._in_thread(self._source.tickets, self._held.ids, want, waiting)
                values["tickets"] = len(tickets)
            for ticket in tickets:
                if ticket.id not in self._held and not self._drains:
                    self._held.arrived(ticket.id, self._spans.clock())
                    self.active += 1
                    count += 1
                    # Tickets of evaluations come first. Tickets of the same kind keep the order of their arrival.
                    self._ready.put_nowait((ticket.purpose is not Purpose.EVAL, count, ticket))
            if self._drains or self.active >= self._concurrency:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._renew_s):
                        await self._slot_is_free.wait()

    async def _play_episodes(self) -> None:
        """Play one ready ticket after another. Each slot runs this in its own asyncio task."""
        while True:
            _, _, ticket = await self._ready.get()
            self._spans.add("queued", self._held.arrival(ticket.id), self._spans.clock(), episode=ticket.id)
            outcome = await self._play(ticket)
            await self._finished.put((ticket.id, outcome, self._spans.clock()))
            self.active -= 1
            self._slot_is_free.set()

    async def _play(self, ticket: Ticket) -> EpisodeOutcome:
        """Run the episode of a ticket. If the episode raises an error, return the reason of the failure."""
        limit = asyncio.timeout(None)

        def begin() -> None:
            self._held.begun(ticket.id)
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
            self._held.ended(ticket.id)

    async def _deliver_outcomes(self) -> None:
        """Deliver all waiting outcomes, wait for the acknowledgement, and release their tickets."""
        while True:
            finished = [await self._finished.get()]
            # Many outcomes are delivered at once. Otherwise an actor that is far from the replay could deliver only one
            # in each round trip.
            while len(finished) < CREDITS and not self._finished.empty():
                finished.append(self._finished.get_nowait())
            await self._delivery.deliver({ticket_id: outcome for ticket_id, outcome, _ in finished})
            # Exactly once: a ticket is released only when its outcome is durable. If the replay's answer is lost, the
            # delivery is repeated, and the replay recognises the trajectory by its id, which is the ticket's.
            for ticket_id, outcome, ended in finished:
                self._show(ticket_id, outcome, ended)
                self._held.acknowledged(ticket_id)

    def _show(self, ticket_id: str, outcome: EpisodeOutcome, ended: float) -> None:
        """Add a delivered episode to the timeline."""
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
        self._spans.add("episode", self._held.arrival(ticket_id), now, episode=ticket_id, **values)

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)


async def first_to_end(*works: Awaitable[object]) -> None:
    """Run all `works` until one of them ends, and then cancel the others. If the first one ended with an error, raises
    this error once all have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
