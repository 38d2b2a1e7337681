"""The receiver over routes that fail as they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.weights.folders import Weights
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.receiver import Receiver, UpdatableEngine
from tests.helpers import async_until
from tests.weights.fakes import HoldingEngine


class Scripted:
    """Raises one error after the other, and then has nothing newer for ever."""

    endpoint = "nowhere"
    received = 0

    def __init__(self, name: str, errors: Sequence[Exception]) -> None:
        self.name = name
        self._errors = list(errors)
        self.resets = 0
        self.waits = False

    async def newer_than(self, version: int) -> Manifest | None:
        if self._errors:
            raise self._errors.pop(0)
        self.waits = True
        await asyncio.Event().wait()
        return None

    async def fetch(self, manifest: Manifest) -> Weights:
        raise NotImplementedError

    def reset(self) -> None:
        self.resets += 1


@asynccontextmanager
async def following(*routes: Scripted) -> AsyncIterator[Receiver]:
    receiver = Receiver(routes, {}, retry_s=0.01)
    task = asyncio.create_task(receiver.run(cast(UpdatableEngine, HoldingEngine())))
    yield receiver
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_version_that_one_route_brought_damaged_is_refused_though_the_last_route_is_unavailable() -> None:
    first, last = Scripted("disk", [WeightsError("torn")]), Scripted("zmq", [UnavailableError("away")])
    async with following(first, last) as receiver:
        await async_until(lambda: first.waits)
        assert receiver.refused == 1


async def test_a_learner_that_is_away_is_no_refused_version() -> None:
    first, last = Scripted("disk", [UnavailableError("gone")]), Scripted("zmq", [UnavailableError("away")])
    async with following(first, last) as receiver:
        await async_until(lambda: first.waits)
        assert receiver.refused == 0


async def test_a_route_that_failed_is_reset_before_it_is_asked_again() -> None:
    route = Scripted("zmq", [WeightsError("torn"), UnavailableError("away")])
    async with following(route):
        await async_until(lambda: route.waits)
        assert route.resets == 2
