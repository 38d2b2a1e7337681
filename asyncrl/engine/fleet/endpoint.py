"""One server of the fleet: the endpoint joins it, gives it the newest weights, checks it, and rejoins it after a fault.

| from | to | when |
|---|---|---|
| LOST | STALE | the server has joined |
| STALE | READY | the server has loaded a whole update |
| READY | SUSPECT | a request has failed |
| SUSPECT | READY | a check passes |
| READY or SUSPECT | STALE | there is a newer update |
| any | LOST | a join, a load or a check has failed |
| STALE or READY | FREED | the learner wants the GPUs (cluster.colocated) |
| FREED | STALE | a period of the servers on the GPUs begins |

Only a READY endpoint gets requests, and its server has exactly the weights of `version`. Answers wait until the canary,
a check of log-probs, has shown that the server has the right weights (`proved`). A fault in an update (see updater.py)
leads to LOST: a server with unknown weights gets no requests until a whole update has succeeded. If an update cannot be
prepared, for example because the disk is full, the server keeps its version, and the update is put off.

What the server reports about its weights before it has joined is ignored. Requests in flight end with a fault when
their endpoint is lost. A fault between FREED and the next READY ends the server (see colocation.py).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.base import PlacedImage
from asyncrl.engine.fleet.colocation import GpuSharing, ServerMemory
from asyncrl.engine.fleet.condition import Condition
from asyncrl.engine.fleet.in_flight import RequestsInFlight
from asyncrl.engine.fleet.pauses import PushPauses
from asyncrl.engine.fleet.server import (
    FreeingServer,
    InferenceServer,
    Segment,
    ServerFaultError,
    ServerSilentError,
    check_segment,
)
from asyncrl.engine.fleet.settings import FleetSettings
from asyncrl.engine.fleet.update import Update
from asyncrl.engine.fleet.updater import ServerUpdater
from asyncrl.errors import EngineError, WeightsError
from asyncrl.masking import masked_text
from asyncrl.types import NO_VERSION, Sampling

logger = logging.getLogger(__name__)

RETRY_DOUBLINGS = 5


class EndpointState(Enum):
    LOST = auto()
    STALE = auto()
    READY = auto()
    FREED = auto()
    SUSPECT = auto()


class Endpoint:
    """A server with its state, its requests and its updates.

    - `target` gives the update that the server should have. The endpoint calls `target` at once after `notify`.
    - `changed` is called at every change of state.
    - The policy's token ids are less than `vocabulary`.
    - The endpoint counts `server_faults`, `server_updates` and `canary_failures` in `counts`.
    - It records in `pauses` each time that an update stops the server.
    - With `sharing` the server shares its GPUs with the learner, and has no GPU memory while `rests` returns true.
    - `heard` is called with the server's URL after each attempt to join: with true if the server joined, and with false
      if it gave no answer in time.
    - `shown_url` is the server's URL with masked secrets.
    - `fault` is the reason why the server is lost or why its update is put off, or "".
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
        sharing: GpuSharing | None = None,
        rests: Callable[[], bool] = lambda: False,
        heard: Callable[[str, bool], None] = lambda url, joined: None,
    ) -> None:
        self.server = server
        self.shown_url = masked_text(server.url)
        self.state = EndpointState.LOST
        self.version = self.proved = NO_VERSION
        self.fault = ""
        self._target = target
        self._changed = changed
        self._vocabulary = vocabulary
        self._counts = counts
        self._settings = settings
        self._rests = rests
        self._heard = heard
        self._requests = RequestsInFlight(server)
        self._memory = None if sharing is None else ServerMemory(cast("FreeingServer", server), sharing)
        self.updater = ServerUpdater(server, self._requests, self._memory, counts, pauses, settings)
        self._failed_updates = 0
        self._put_off: Update | None = None
        self._tried_again_at = 0.0
        self._label = ""
        self._logged = ""
        self._condition = Condition()
        self._keeper = asyncio.create_task(self._keep(), name=f"endpoint {server.url}")

    @property
    def ready(self) -> bool:
        return self.state is EndpointState.READY

    @property
    def lost(self) -> bool:
        return self.state is EndpointState.LOST

    def fails(self, version: int) -> bool:
        """True if the server is lost, or serves an older version than `version` and its update is put off."""
        return self.lost or (self._put_off is not None and self.version < version)

    @property
    def salt(self) -> str | None:
        """The name of the prefix cache of the server's version; None if all versions share one cache."""
        return self._label if self._settings.salted else None

    @property
    def in_flight(self) -> int:
        """The number of requests that the server has not answered yet."""
        return len(self._requests)

    def notify(self) -> None:
        self._condition.notify_all()

    async def generate(
        self,
        tokens: NDArray[np.int32],
        sampling: Sampling,
        stop: Sequence[int],
        salt: str | None = None,
        routed_from: int | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Segment:
        """Continue `tokens` on the server (see `InferenceServer`). Cancelling the call aborts the request.

        Raises ServerFaultError also if the server was lost meanwhile, has weights from another fleet, or answers with
        ids outside the vocabulary or with impossible log-probs.
        """
        rid, label = uuid.uuid4().hex, self._label
        asked: dict[str, Any] = {} if routed_from is None else {"routed_from": routed_from}
        asked |= {"images": images} if images else {}
        try:
            async with self._requests.one(rid):
                segment = await self.server.generate(rid, tokens, sampling, stop, salt, **asked)
                await self.updater.verdict()
            check_segment(segment, self._vocabulary)
            self._check_labels(segment, label)
        except TimeoutError as error:
            raise ServerFaultError(f"{self.server.url} was lost") from error
        except ServerFaultError:
            if self.ready:
                self._enter(EndpointState.SUSPECT)
            raise
        return segment

    async def logprobs(
        self, tokens: NDArray[np.int32], start: int, images: Sequence[PlacedImage] = ()
    ) -> tuple[NDArray[np.float32], int]:
        """The log-probs float32[T - start] of `tokens` from `start` on, and the version that gives them.

        The log-probs are at temperature 1 and without a grammar; `images` are before `start`. Raises EngineError: the
        server is not ready, fails, or gets other weights meanwhile.
        """
        label, version = self._label, self.version
        if not self.ready or self.updater.proving:
            raise ServerFaultError(f"{self.server.url} takes no requests now")
        try:
            async with self._requests.one(uuid.uuid4().hex):
                shown: dict[str, Any] = {"images": images} if images else {}
                found = await self.server.logprobs(tokens.tolist(), self.salt, start, **shown)
        except TimeoutError as error:
            raise ServerFaultError(f"{self.server.url} was lost") from error
        if not self.ready or self._label != label:
            raise ServerFaultError(f"{self.server.url} gets other weights")
        return found, version

    def lose(self) -> None:
        """End the requests in flight with a fault."""
        self._requests.interrupt()

    async def leave(self, grace_s: float) -> None:
        """Give the server up. Requests in flight may take up to `grace_s` seconds to end if the endpoint is READY and
        its version is proved. If not, they are ended at once."""
        grace_s = grace_s if self.ready and not self.updater.proving else 0.0
        self._keeper.cancel()
        try:
            await asyncio.gather(self._keeper, return_exceptions=True)
            await self._requests.idle(grace_s)
            self.lose()
            await self._requests.aborted()
            with suppress(EngineError):
                await self.server.leave()
        finally:
            await self.server.close()

    def _check_labels(self, segment: Segment, sent_under: str) -> None:
        """Raises ServerFaultError: the answer is from weights of another fleet, or from other weights than expected."""
        # A server that cannot report which version sampled which token runs no requests during an update, so the whole
        # answer is from one version.
        owner = _owner(sent_under)
        for span in segment.spans:
            if _owner(span.label) != owner or (not self.server.spans and span.label != sent_under):
                raise ServerFaultError(f"{self.server.url} answered with weights {span.label!r}, not from this fleet")

    async def _keep(self) -> None:
        while True:
            try:
                await self._serve()
            except Exception as error:
                if (task := asyncio.current_task()) and task.cancelling():
                    raise
                fault = str(error) or repr(error)
                if not isinstance(error, EngineError | WeightsError) and fault != self.fault:
                    logger.exception("an unexpected error of %s", self.server.url)
                self._log(error)
                self.fault = fault
            if self._memory is not None:
                self._memory.give_up()
            self.version = NO_VERSION
            self._put_off = None
            self._enter(EndpointState.LOST)
            # Answers that still wait for the verdict on their weights must not be used.
            self.lose()
            await asyncio.sleep(self._pause_s)

    @property
    def _pause_s(self) -> float:
        """The pause before the next attempt."""
        return self._settings.retry_s * 2.0 ** min(self._failed_updates, RETRY_DOUBLINGS)

    async def _serve(self) -> None:
        """Join the server and keep its weights up to date. Ends only by an error."""
        try:
            await self.server.join()
        except ServerSilentError:
            self._heard(self.server.url, False)
            raise
        logger.info("%s joined", self.server.url)
        self._heard(self.server.url, True)
        self._enter(EndpointState.STALE)
        while True:
            await self._condition.wait_for(
                lambda: self._rests() or self._newer() or self._suspect, self._settings.check_s
            )
            if self._memory is not None and self._rests():
                await self._rest(self._memory)
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
        if target is self._put_off and asyncio.get_running_loop().time() < self._tried_again_at:
            return None
        return target if target is not None and target.version > self.version else None

    async def _rest(self, memory: ServerMemory) -> None:
        """Free the server's memory, wait for our period on the GPUs, and get the memory of its weights back."""
        self._enter(EndpointState.STALE)
        await self._requests.abort_all()
        await memory.free()
        self.version = NO_VERSION
        self._enter(EndpointState.FREED)
        await self._condition.wait_for(lambda: not self._rests())
        self._enter(EndpointState.STALE)
        await memory.regain_weights()

    def _is_too_new(self, update: Update) -> bool:
        """True if the server was leased meanwhile to sessions that need an older version, so that it must not take the
        `update`."""
        target = self._target(self)
        return target is not None and target.version < update.version

    async def _update(self, update: Update) -> None:
        self._failed_updates += 1
        with update.kept():
            # Until the update is ready to be loaded, the server takes requests under its old version.
            try:
                await self.server.prepare(update)
            except WeightsError as error:
                if self.version == NO_VERSION:
                    raise
                self._put_update_off(update, error)
                return
            if self._is_too_new(update):
                self._failed_updates = 0
                return
            self._enter(EndpointState.STALE)
            loaded = partial(self._take_requests, update)
            await self.updater.switch(update, self.version != NO_VERSION, loaded)
        self._failed_updates = 0
        self._put_off = None
        self.proved = update.version
        self.fault = ""
        self._counts["server_updates"] += 1
        self._take_requests(update)

    def _put_update_off(self, update: Update, error: WeightsError) -> None:
        """Keep the server's version, and try `update` again after a pause."""
        if str(error) != self.fault:
            logger.warning("%s stays at version %d for now: %s", self.server.url, self.version, error)
        self.fault = str(error)
        self._put_off = update
        self._tried_again_at = asyncio.get_running_loop().time() + self._pause_s
        self._changed()

    def _take_requests(self, update: Update) -> None:
        self.version, self._label = update.version, update.label
        # If a request failed before the verdict, the state stays SUSPECT, so that the server is checked.
        self._enter(self.state if self._suspect else EndpointState.READY)

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


def _owner(label: str) -> str:
    return label.partition("-")[2]
