"""One server of the fleet: joined, brought to the newest weights, watched, and joined again after a fault.

    LOST ──join──► STALE ──load a whole update──► READY ◄──a check passes──┐
                     ▲                              │  └──a request fails──► SUSPECT
                     └───────a newer update─────────┴─────────────────────────┘
    any state ──a fault of join, load or check──► LOST
    STALE or READY ──the learner wants the GPUs──► FREED ──they are ours again──► STALE

Only a READY endpoint is given requests, and its server has exactly the weights of `version`. A fault in an update leads
to LOST: a server with unknown weights gets no requests until a whole update has succeeded. What the server reported of
its weights before it joined does not count. Requests in flight end with a fault when their endpoint is lost.

An update has succeeded once the server repeats the version's canary (see weights/canary.py). A paused server answers
nothing, so it goes on with its requests for that moment; what these answer meanwhile waits for the verdict.

FREED is there with cluster.colocated alone (see colocation.py): a fault between it and the next READY ends the server.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import cast

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.engine.fleet.colocation import ServerTurns
from asyncrl.actor.engine.fleet.condition import Condition
from asyncrl.actor.engine.fleet.pauses import PushPauses
from asyncrl.actor.engine.fleet.server import (
    CACHE,
    MEMORY,
    WEIGHTS,
    FreeingServer,
    InferenceServer,
    Segment,
    ServerFaultError,
    check_segment,
)
from asyncrl.actor.engine.fleet.settings import FleetSettings
from asyncrl.actor.engine.fleet.update import Update
from asyncrl.errors import EngineError, WeightsError
from asyncrl.types import NO_VERSION, Sampling
from asyncrl.weights.canary import CanaryError, CanaryJudge

logger = logging.getLogger(__name__)

RETRY_DOUBLINGS = 5
ABORT_S = 60.0
ABORT_RETRY_S = 0.1
"""An abort that overtakes a request does not end it: aborts are repeated until none is in flight."""


class EndpointState(Enum):
    LOST = auto()
    STALE = auto()
    READY = auto()
    FREED = auto()
    SUSPECT = auto()


class Endpoint:
    """`target` gives the update that the server should have; the policy's ids are less than `vocabulary`.

    `changed` is called at every change of state; `notify` lets the endpoint look at its target at once. `counts` gets
    `server_faults`, `server_updates` and `canary_failures`, `pauses` each stop by an update. `fault` is the reason why
    the server is lost, "" if it is not. `refused` has the version whose canary the server failed last, and how often.
    With `turns` the server shares its GPUs with the learner, and has none of their memory while `rests` is true.
    """

    def __init__(
        self,
        server: InferenceServer,
        target: Callable[[Endpoint], Update | None],
        changed: Callable[[], None],
        vocabulary: int,
        counts: Counter[str],
        pauses: PushPauses,
        settings: FleetSettings,
        turns: ServerTurns | None = None,
        rests: Callable[[], bool] = lambda: False,
    ) -> None:
        self.server = server
        self.state = EndpointState.LOST
        self.version = NO_VERSION
        self.canary = CanaryJudge()
        self.refused: dict[int, int] = {}
        self.fault = ""
        self._target = target
        self._proving = False
        self._changed = changed
        self._vocabulary = vocabulary
        self._counts = counts
        self._pauses = pauses
        self._settings = settings
        self._turns = turns
        self._rests = rests
        self._freed: set[str] = set()
        self._freed_by = 0
        self._failed_updates = 0
        self._label = ""
        self._logged = ""
        self._in_flight: set[asyncio.Timeout] = set()
        self._aborts: set[asyncio.Task[None]] = set()
        self._condition = Condition()
        self._keeper = asyncio.create_task(self._keep(), name=f"endpoint {server.url}")

    @property
    def ready(self) -> bool:
        return self.state is EndpointState.READY

    @property
    def lost(self) -> bool:
        return self.state is EndpointState.LOST

    @property
    def in_flight(self) -> int:
        """Requests that the server has not answered yet."""
        return len(self._in_flight)

    def notify(self) -> None:
        self._condition.notify_all()

    async def generate(self, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int]) -> Segment:
        """As the server does. Cancelling the call aborts the request.

        Raises ServerFaultError also where the server was lost meanwhile, or answers with weights of another owner, with
        ids outside the vocabulary or with impossible log-probs.
        """
        rid, label, scope = uuid.uuid4().hex, self._label, asyncio.timeout(None)
        try:
            async with scope:
                self._in_flight.add(scope)
                segment = await self.server.generate(
                    rid, tokens, sampling, stop, label if self._settings.salted else None
                )
                await self._condition.wait_for(lambda: not self._proving)
            check_segment(segment, self._vocabulary)
            self._check_labels(segment, label)
        except TimeoutError as error:
            raise ServerFaultError(f"{self.server.url} was lost") from error
        except ServerFaultError:
            if self.ready:
                self._enter(EndpointState.SUSPECT)
            raise
        except asyncio.CancelledError:
            abort = asyncio.create_task(self._abort(rid))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
            raise
        finally:
            self._in_flight.discard(scope)
            if not self._in_flight:
                self.notify()
        return segment

    def lose(self) -> None:
        """End the requests in flight with a fault."""
        for scope in self._in_flight:
            interrupt(scope)

    async def leave(self, grace_s: float) -> None:
        """Keep the server no longer. Requests in flight may end within `grace_s`, unless this interrupts an update."""
        grace_s = grace_s if self.ready else 0.0
        self._keeper.cancel()
        try:
            await asyncio.gather(self._keeper, return_exceptions=True)
            await self._idle(grace_s)
            self.lose()
            await asyncio.gather(*self._aborts)
            with suppress(EngineError):
                await self.server.leave()
        finally:
            await self.server.close()

    async def _abort(self, rid: str) -> None:
        with suppress(EngineError):
            await self.server.abort(rid)

    def _check_labels(self, segment: Segment, sent_under: str) -> None:
        """Without spans a request never meets an update, so that its label is that under which it was sent."""
        owner = _owner(sent_under)
        for span in segment.spans:
            if _owner(span.label) != owner or (not self.server.spans and span.label != sent_under):
                raise ServerFaultError(f"{self.server.url} answered with weights {span.label!r}, which are not ours")

    async def _keep(self) -> None:
        while True:
            try:
                await self._serve()
            except Exception as error:
                if (task := asyncio.current_task()) and task.cancelling():
                    raise
                if not isinstance(error, EngineError | WeightsError):
                    logger.exception("an unexpected error of %s", self.server.url)
                self._log(error)
                self.fault = str(error)
            if self._turns is not None and self._freed:
                process = self._turns.process(self.server.url)
                # The one that freed memory may have ended, which is why a call of ours failed, and another one started.
                if process.starts == self._freed_by:
                    process.end()
            self._freed.clear()
            self.version = NO_VERSION
            self._enter(EndpointState.LOST)
            # An answer that waits for a verdict which did not come must not go on: `_proving` stays until the next one.
            self.lose()
            await asyncio.sleep(self._settings.retry_s * 2 ** min(self._failed_updates, RETRY_DOUBLINGS))

    async def _serve(self) -> None:
        """Join the server and keep its weights up to date. Returns only by an error."""
        await self.server.join()
        logger.info("%s joined", self.server.url)
        self._enter(EndpointState.STALE)
        while True:
            await self._condition.wait_for(
                lambda: self._rests() or self._newer() or self._suspect, self._settings.check_s
            )
            if self._turns is not None and self._rests():
                await self._rest(self._turns)
            elif update := self._newer():
                await self._update(update)
            else:
                await self.server.check()
                if self._suspect:
                    self._enter(EndpointState.READY)

    @property
    def _suspect(self) -> bool:
        return self.state is EndpointState.SUSPECT

    def _newer(self) -> Update | None:
        target = self._target(self)
        return target if target is not None and target.version > self.version else None

    async def _rest(self, turns: ServerTurns) -> None:
        """Free the server's memory, and get that of its weights back when the GPUs are ours again."""
        server, process = cast("FreeingServer", self.server), turns.process(self.server.url)
        self._enter(EndpointState.STALE)
        await self._abort_all()
        # A server that refuses a flush still has requests in its queues, and would die of freeing its memory.
        await server.flush()
        self._freed_by, freeing = process.starts, [each for each in MEMORY if each not in self._freed]
        self._freed.update(freeing)
        await server.free(freeing)
        process.freed, self.version = True, NO_VERSION
        self._enter(EndpointState.FREED)
        await self._condition.wait_for(lambda: not self._rests())
        if process.starts != self._freed_by or not process.running:
            self._freed.clear()
            raise ServerFaultError(f"{server.url} ended while the learner had its GPUs")
        process.freed = False
        self._enter(EndpointState.STALE)
        await server.regain([WEIGHTS])
        self._freed.discard(WEIGHTS)

    def _is_too_new(self, update: Update) -> bool:
        """Whether the server was leased to an older version meanwhile, and must not go on to `update`."""
        target = self._target(self)
        return target is not None and target.version < update.version

    async def _update(self, update: Update) -> None:
        self._failed_updates += 1
        with update.kept():
            # The server takes requests under its version until the update is ready to be loaded.
            await self.server.prepare(update)
            if self._is_too_new(update):
                self._failed_updates = 0
                return
            self._enter(EndpointState.STALE)
            await self._switch(update)
        self._failed_updates = 0
        self.version, self._label = update.version, update.label
        self.fault = ""
        self._counts["server_updates"] += 1
        self._enter(EndpointState.READY)

    async def _switch(self, update: Update) -> None:
        """Bring the server to `update`. After an error its weights are unknown."""
        server, settings, clock = self.server, self._settings, self._pauses.clock
        pauses = settings.mode in ("in_place", "retract") and server.spans
        drained = not pauses and settings.mode == "drain" and await self._idle(settings.drain_s)
        told = clock()
        if pauses:
            await server.pause(settings.mode)
        elif not drained:
            await self._abort_all()
        stopped = clock()
        await self._load(update)
        loaded = clock()
        if self._freed:
            update.drop_copies()
            await cast("FreeingServer", server).regain([CACHE])
            self._freed.clear()
        if pauses:
            self._proving = update.check is not None
            await server.resume()
        else:
            # It is given requests only then.
            await self._prove(update)
        if self.version != NO_VERSION:
            self._pauses.add(server.url, update.version, told, stopped, loaded)
        if pauses:
            await self._prove(update)
        self._proving = False
        self.notify()

    async def _prove(self, update: Update) -> None:
        """Raises CanaryError: the server does not repeat what the learner gave."""
        check, server = update.check, self.server
        if check is None:
            return
        by = f"{server.url} (by {server.way})"
        try:
            try:
                salt = update.label if self._settings.salted else None
                answer = await server.logprobs(check.canary.tokens, salt)
            except EngineError as error:
                raise self.canary.refuse(check, by, str(error)) from error
            self.canary.judge(check, answer, server.precision, by)
        except CanaryError:
            self._counts["canary_failures"] += 1
            self.refused = {update.version: self.refused.get(update.version, 0) + 1}
            raise
        logger.info(
            "%s repeats the canary of version %d: %.2g on average, %.2g is allowed",
            *(by, update.version, self.canary.difference, self.canary.allowed),
        )

    async def _load(self, update: Update) -> None:
        """Load and flush at once: no request runs meanwhile, so nothing gets into the cache that is flushed."""
        flush = asyncio.create_task(self.server.flush()) if not self._settings.salted else None
        try:
            await self.server.load(update)
            if flush is not None:
                await flush
        finally:
            if flush is not None:
                flush.cancel()
                await asyncio.gather(flush, return_exceptions=True)

    async def _abort_all(self) -> None:
        for _ in range(int(ABORT_S / ABORT_RETRY_S)):
            if not self._in_flight:
                return
            await self.server.abort()
            if await self._idle(ABORT_RETRY_S):
                return
        raise ServerFaultError(f"requests did not end within {ABORT_S:g} s of being aborted")

    async def _idle(self, seconds: float) -> bool:
        """Whether no request was in flight at some moment of the next `seconds`."""
        return await self._condition.wait_for(lambda: not self._in_flight, seconds)

    def _log(self, error: Exception) -> None:
        if self.state is not EndpointState.LOST:
            self._counts["server_faults"] += 1
            logger.warning("%s is lost, its requests go to other servers: %s", self.server.url, error)
        elif str(error) != self._logged:
            logger.info("waiting for %s: %s", self.server.url, error)
            self._logged = str(error)

    def _enter(self, state: EndpointState) -> None:
        self.state = state
        self.notify()
        self._changed()


def interrupt(scope: asyncio.Timeout) -> None:
    """Have the body of `scope` end with TimeoutError now."""
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())


def _owner(label: str) -> str:
    return label.partition("-")[2]
