"""Updates one server from one version of the weights to the next.

    paused:         pause ──► load, flush ──► resume ──► canary ──► answers are used
    idle:           abort or drain ──► load, flush ──► canary, new requests ──► answers are used
    after requests: abort and load ──► flush ──► canary, new requests ──► answers are used

In the modes in_place and retract, a server that can tell which version sampled which token is paused, and its requests
continue after the update. In other modes, and on other servers, no request may run during an update. Some servers
queue an update after their requests: they get the update together with the abort, and load it while answers are still
arriving.

An update has succeeded once the server has passed the version's canary, a check of log-probs (weights/canary.py). A
paused server cannot answer the canary, so it first resumes its requests. An idle server gets new requests together with
the canary. Answers to all these requests wait for the verdict on the canary.

If the canary itself waits too long in the queue of a full server, the requests are aborted. They keep their tokens, and
continue after the verdict. Turns under a grammar start over.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.fleet.colocation import ServerMemory
from asyncrl.engine.fleet.condition import Condition
from asyncrl.engine.fleet.in_flight import RequestsInFlight
from asyncrl.engine.fleet.pauses import PushPauses
from asyncrl.engine.fleet.server import InferenceServer, ServerFaultError, ServerSilentError
from asyncrl.engine.fleet.settings import FleetSettings
from asyncrl.engine.fleet.update import Update
from asyncrl.errors import EngineError
from asyncrl.weights.canary import CanaryError, CanaryJudge

logger = logging.getLogger(__name__)


class ServerUpdater:
    """Updates `server`.

    - `requests` are the requests that the server has not answered yet.
    - `memory` is given if the server shares its GPUs with the learner.
    - The updater counts `canary_failures` in `counts`, and records in `pauses` each time that an update stops the
      server.
    - `canary` judges the answers to canaries, and has the difference that it found last.
    - `refused` has the last version whose canary the server has failed, with the number of failures.
    """

    def __init__(
        self,
        server: InferenceServer,
        requests: RequestsInFlight,
        memory: ServerMemory | None,
        counts: Counter[str],
        pauses: PushPauses,
        settings: FleetSettings,
    ) -> None:
        self.canary = CanaryJudge()
        self.refused: dict[int, int] = {}
        self._server = server
        self._requests = requests
        self._memory = memory
        self._counts = counts
        self._pauses = pauses
        self._settings = settings
        self._proving = False
        self._proved = Condition()

    @property
    def proving(self) -> bool:
        """True while the canary has not yet shown that the server has the right weights."""
        return self._proving

    async def switch(self, update: Update, serving: bool, loaded: Callable[[], None] = lambda: None) -> None:
        """Update the server to `update`, which it has prepared.

        `serving`: the server had a version before, so the update stops the server. As soon as the update has called
        `loaded`, an idle server may get requests again; their answers wait for the verdict. After an error the server's
        weights are unknown, and these answers wait until the next verdict. Raises ServerFaultError, WeightsError, and
        CanaryError: the server fails the canary.
        """
        if self._settings.mode in ("in_place", "retract") and self._server.spans:
            await self._switch_paused(update, serving)
        else:
            await self._switch_idle(update, serving, loaded)
        self._proving = False
        self._proved.notify_all()

    async def verdict(self) -> None:
        """Wait until the canary has proved the weights with which the server has just answered."""
        if self._proving:
            await self._proved.wait_for(lambda: not self._proving)

    async def _switch_paused(self, update: Update, serving: bool) -> None:
        server, clock = self._server, self._pauses.clock
        told = clock()
        # Before a flush the pause is `retract`: in an in_place pause, a request of an earlier actor or of the server's
        # warm-up would prevent the flush.
        await server.pause("retract" if self._flushes(serving) else self._settings.mode)
        stopped = clock()
        await self._load(update, serving)
        loaded = clock()
        self._proving = update.check is not None
        await server.resume()
        if serving:
            self._pauses.add(server.url, update.version, told, stopped, loaded)
        await self._prove(update)

    async def _switch_idle(self, update: Update, serving: bool, loaded: Callable[[], None]) -> None:
        settings, clock = self._settings, self._pauses.clock
        drained = settings.mode == "drain" and await self._requests.idle(settings.drain_s)
        told = clock()
        if not drained and self._server.loads_after_requests:
            stopped = await self._load_after_requests(update, serving)
        else:
            if not drained:
                await self._requests.abort_all()
            stopped = clock()
            await self._load(update, serving)
        if serving:
            self._proving = update.check is not None
            self._pauses.add(self._server.url, update.version, told, stopped, clock())
            loaded()
        await self._prove(update)

    async def _load_after_requests(self, update: Update, serving: bool) -> float:
        """Load while the server answers aborted requests. Returns the time when the last request was answered."""
        # The cache is flushed only after all requests: a request that overtook the update may have cached old prefixes.
        load = asyncio.create_task(self._server.load(update))
        try:
            await self._requests.abort_all()
            stopped = self._pauses.clock()
            if self._flushes(serving):
                await self._server.flush()
            await load
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
        if self._memory is not None:
            await self._memory.regain_cache(update)
        return stopped

    def _flushes(self, serving: bool) -> bool:
        """True if the cache must be flushed with the update."""
        # A server that rejoins may have computed prefixes with half an update, or with weights that failed a canary.
        return not (self._settings.salted and serving)

    async def _load(self, update: Update, serving: bool) -> None:
        """Load and flush at the same time, since no request runs that could fill the cache."""
        flush = asyncio.create_task(self._server.flush()) if self._flushes(serving) else None
        try:
            await self._server.load(update)
            if flush is not None:
                await flush
        finally:
            if flush is not None:
                flush.cancel()
                await asyncio.gather(flush, return_exceptions=True)
        if self._memory is not None:
            await self._memory.regain_cache(update)

    async def _prove(self, update: Update) -> None:
        check, server = update.check, self._server
        if check is None:
            return
        by = f"{server.url} (loaded by {server.route})"
        try:
            try:
                salt = update.label if self._settings.salted else None
                answer = await self._canary_answer(check.canary.tokens, salt)
            except ServerSilentError as error:
                raise ServerFaultError(
                    f"{by} did not answer the canary of version {update.version}: {error}"
                ) from error
            except EngineError as error:
                # If a server fails, the new weights may be the cause. If it refuses the request, it cannot answer any
                # canary.
                advice = "" if isinstance(error, ServerFaultError) else "; weights.canary=false turns the canary off"
                raise self.canary.refuse(check, by, str(error), advice) from error
            self.canary.judge(check, answer, server.precision, by)
        except CanaryError:
            self._counts["canary_failures"] += 1
            self.refused = {update.version: self.refused.get(update.version, 0) + 1}
            raise
        logger.info(
            "%s passes the canary of version %d: log-probs differ by %.2g on average, %.2g is allowed",
            *(by, update.version, self.canary.difference, self.canary.allowed),
        )

    async def _canary_answer(self, tokens: Sequence[int], salt: str | None) -> NDArray[np.float32]:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.canary_s):
                return await self._server.logprobs(tokens, salt)
        try:
            await self._server.abort()
        except EngineError as error:
            raise ServerSilentError(f"its requests could not be aborted: {error}") from error
        return await self._server.logprobs(tokens, salt)
