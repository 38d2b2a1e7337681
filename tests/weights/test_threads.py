"""Weights wait for no tool: with all of asyncio's own threads blocked, updates go on by every route."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import EngineConfig
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.engine.fleet.folders import Folders
from asyncrl.types import Sampling
from asyncrl.weights.disk_route import DiskRoute
from asyncrl.weights.folders import read_folder, run_directory, write_folder
from asyncrl.weights.threads import NewestOnly, in_own_thread
from tests.engine.fleet.fakes import FakeSglang, assert_true, fleet_over, ids, serving, tensors
from tests.engine.support import parameters, tiny_model
from tests.helpers import OWN_RUN, async_until
from tests.weights.fakes import newer, publisher, route, same_bits, some_tensors

LIMIT_S = 20.0


def test_a_call_that_fails_keeps_nothing_of_what_it_held():
    class Held:
        pass

    async def run() -> weakref.ref[Held]:
        held = Held()

        def call(held: Held = held) -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await in_own_thread(call)
        return weakref.ref(held)

    gc.disable()
    try:
        assert asyncio.run(run())() is None
    finally:
        gc.enable()


@contextlib.asynccontextmanager
async def blocked_tools() -> AsyncIterator[None]:
    """All of the default threads are held by a tool that does not come back."""
    release, held = threading.Event(), threading.Event()

    def tool() -> None:
        held.set()
        release.wait()

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    working = asyncio.create_task(asyncio.to_thread(tool))
    try:
        await async_until(held.is_set)
        async with asyncio.timeout(LIMIT_S):
            yield
    finally:
        release.set()
        await working


@pytest.mark.parametrize("given", ["tensors", "folder"])
async def test_a_fleet_is_updated_and_closed(given: str, tmp_path: Path) -> None:
    server, weights = FakeSglang(), tensors(3)
    if given == "folder":
        weights = read_folder(write_folder(tmp_path / "pushed", 3, weights, lambda folder: None), 3)
    folders = Folders(tmp_path / "held", lambda folder: None, OWN_RUN)
    async with serving(server), blocked_tools(), fleet_over(server, folders=folders) as fleet:
        await fleet.update_weights(3, weights)
        assert_true(await fleet.generate(ids(), Sampling(1.0, 5), (), "s"))


async def test_an_embedded_engine_is_updated_and_closed() -> None:
    async with blocked_tools():
        engine = EmbeddedEngine(tiny_model(), EngineConfig(slots=1, max_length=8))
        await engine.update_weights(4, parameters(tiny_model(seed=4)))
        await engine.close()
    assert engine.version == 4


async def test_deltas_are_applied(context: Any) -> None:
    with publisher(context) as source:
        async with blocked_tools(), route(source.endpoint) as link:
            for version in (0, 1):
                source.publish(version, {**some_tensors(), "ids": some_tensors()["ids"] + version})
                manifest = await newer(link, version - 1)
                taken = await link.fetch(manifest)
            assert taken["ids"][0] == 1
            assert link.received < 2 * manifest.nbytes


@pytest.mark.parametrize("read", [True, False])
async def test_folders_are_read_and_checked(read: bool, tmp_path: Path) -> None:
    write_folder(run_directory(tmp_path, OWN_RUN), 2, some_tensors(2), lambda folder: None)
    link = DiskRoute(tmp_path, OWN_RUN, read=read)
    async with blocked_tools():
        taken = await link.fetch(await link.newer_than(1))
    assert same_bits(taken if read else taken.read(), some_tensors(2))


async def test_an_error_is_told_and_calls_wait_for_nobody() -> None:
    both = threading.Barrier(2)

    def fail() -> None:
        raise ValueError("in the thread")

    assert set(await asyncio.gather(*(in_own_thread(lambda: both.wait(LIMIT_S)) for _ in range(2)))) == {0, 1}
    with pytest.raises(ValueError, match="in the thread"):
        await in_own_thread(fail)


@contextlib.contextmanager
def busy_newest_only() -> Iterator[tuple[NewestOnly, threading.Event]]:
    """A thread in which one call runs until the event is set."""
    begun, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert goes_on.wait(LIMIT_S)

    calls = NewestOnly("test-newest")
    held = calls.begin(hold)
    assert begun.wait(LIMIT_S)
    try:
        yield calls, goes_on
        held.result(LIMIT_S)
    finally:
        goes_on.set()
        calls.close()


def test_a_call_that_a_newer_one_replaces_is_cancelled_and_does_not_get_the_error_of_the_newer_one() -> None:
    def fail() -> None:
        raise ValueError("the newer call")

    with busy_newest_only() as (calls, goes_on):
        replaced, newer = calls.begin(lambda: None), calls.begin(fail)
        assert replaced.cancelled()
        assert wait([replaced], LIMIT_S).done
        goes_on.set()
        with pytest.raises(ValueError, match="the newer call"):
            newer.result(LIMIT_S)


def test_the_future_of_a_call_that_waits_ends_when_the_thread_is_closed() -> None:
    with busy_newest_only() as (calls, goes_on):
        waits = calls.begin(lambda: None)
        closing = threading.Thread(target=calls.close)
        closing.start()
        goes_on.set()
        closing.join(LIMIT_S)
        assert waits.done()
