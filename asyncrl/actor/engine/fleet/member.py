"""One server as a member of the fleet: joined, brought to the target version, watched, and lost again.

    AWAY ─join─► BEHIND ─switch─► READY ─a newer target─► BEHIND ...
    any ─a fault─► AWAY, which ends its requests under way: they go elsewhere

What holds: only a READY member is given requests, and it has exactly the weights of its `version`. Whatever fails in
an update leads to AWAY, so that a server with unknown weights gets no requests until a whole update has succeeded. What
the server said of its weights before it joined is never believed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.engine.fleet.server import Segment, Server, ServerFaultError
from asyncrl.actor.engine.fleet.signal import Signal
from asyncrl.actor.engine.fleet.update import Update
from asyncrl.errors import EngineError, WeightsError
from asyncrl.types import NO_VERSION, Sampling

logger = logging.getLogger(__name__)

RETRY_S = 1.0
RETRY_DOUBLINGS = 5

T = TypeVar("T")


class State(StrEnum):
    AWAY = "away"
    BEHIND = "behind"
    READY = "ready"


Switch = Callable[["Member", Update], Awaitable[None]]
"""Brings a member's server to an update; the member gets no new requests meanwhile."""


class Member:
    """`target` gives the update that a member should have; `changed` is notified of every change of state.

    A server is checked every `check_s`. One that is away is tried again after `RETRY_S`, and after twice the time for
    every further fault of an update, `RETRY_DOUBLINGS` times.
    """

    def __init__(
        self,
        server: Server,
        target: Callable[[Member], Update | None],
        switch: Switch,
        changed: Signal,
        check_s: float,
    ) -> None:
        self.server = server
        self.state = State.AWAY
        self.version = NO_VERSION
        self.faults = 0
        self.updates = 0
        self.under_way = 0
        self._failed_updates = 0
        self._told = ""
        self._label = ""
        self._target = target
        self._switch = switch
        self._changed = changed
        self._check_s = check_s
        self._suspect = False
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def ready(self) -> bool:
        return self.state is State.READY and not self._suspect

    async def keep(self) -> None:
        """Keep the server in the fleet; returns only by cancellation, after which requests under way may still end."""
        try:
            while True:
                try:
                    await self._attend()
                except Exception as error:
                    if _cancelled():
                        raise
                    if not isinstance(error, EngineError | WeightsError):
                        logger.exception("%s met what was not foreseen", self.server.url)
                    self._leave(error)
                await asyncio.sleep(RETRY_S * 2 ** min(self._failed_updates, RETRY_DOUBLINGS))
        finally:
            self._enter(State.AWAY)

    async def generate(
        self, rid: str, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int], salted: bool
    ) -> Segment:
        """As the server does; `salted` keeps prefixes of other versions apart.

        Raises ServerFaultError also where the server was lost meanwhile, or answers with weights that are not ours.
        """
        label = self._label
        call = self.server.generate(rid, tokens, sampling, stop, label if salted else None)
        self.under_way += 1
        try:
            segment = await self._unless_lost(call)
            self._check_labels(segment, label)
        except ServerFaultError:
            self._suspect = True
            self._changed.notify()
            raise
        finally:
            self.under_way -= 1
            self._changed.notify()
        return segment

    def _check_labels(self, segment: Segment, sent_under: str) -> None:
        """Without spans a request never meets an update, so that its label is that under which it was sent."""
        owner = _owner(sent_under)
        for span in segment.spans:
            if _owner(span.label) != owner or (not self.server.spans and span.label != sent_under):
                raise ServerFaultError(
                    f"{self.server.url} answered with weights {span.label!r}, which it was not given"
                )

    async def _attend(self) -> None:
        """One life of the server: from joining it until a fault."""
        await self.server.join()
        logger.info("%s joined", self.server.url)
        self._lost = asyncio.get_running_loop().create_future()
        self._enter(State.BEHIND)
        while True:
            target = self._target(self)
            if target is not None and target.version > self.version:
                await self._update(target)
            elif not await self._changed.wait_for(self._something_to_do, self._check_s) or self._suspect:
                await self.server.check()
                self._suspect = False
                self._changed.notify()

    def _something_to_do(self) -> bool:
        target = self._target(self)
        return self._suspect or (target is not None and target.version > self.version)

    async def _update(self, target: Update) -> None:
        self._enter(State.BEHIND)
        self._failed_updates += 1
        with target.kept():
            await self._switch(self, target)
        self._failed_updates = 0
        self.version, self._label = target.version, target.label
        self.updates += 1
        self._enter(State.READY)

    def _leave(self, error: Exception) -> None:
        if self.state is not State.AWAY:
            self.faults += 1
            logger.warning("%s is lost, its requests go elsewhere: %s", self.server.url, error)
        elif str(error) != self._told:
            logger.info("waiting for %s: %s", self.server.url, error)
            self._told = str(error)
        self.version = NO_VERSION
        self._suspect = False
        self._enter(State.AWAY)
        self.lose()

    def lose(self) -> None:
        """End the requests under way with a fault."""
        if not self._lost.done():
            self._lost.set_result(None)

    def _enter(self, state: State) -> None:
        self.state = state
        self._changed.notify()

    async def _unless_lost(self, call: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(call)
        try:
            await asyncio.wait((task, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ServerFaultError(f"{self.server.url} was lost")
        finally:
            task.cancel()


def _cancelled() -> bool:
    """Whether what this task meets is met on its way out: a fault must not call it back."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def label_of(version: int, owner: str) -> str:
    return f"{version}-{owner}"


def version_of(label: str) -> int:
    """The version in a label that `label_of` made."""
    return int(label.partition("-")[0])


def _owner(label: str) -> str:
    return label.partition("-")[2]
