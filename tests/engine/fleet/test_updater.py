"""The update of a server to the next version, and its requests meanwhile, in every mode."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.base import Generation
from asyncrl.engine.fleet.folders import Folders
from tests.engine.fleet.fakes import (
    FakeSglang,
    assert_true,
    counter,
    fleet_with,
    sample,
    tensors,
)
from tests.helpers import OWN_RUN, async_until

pytestmark = pytest.mark.slow

LONG = 300


@pytest.mark.parametrize("version", ["0.5.23", "0.5.17"])
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort", "drain"])
@pytest.mark.parametrize("segment_tokens", [0, 70])
async def test_turns_survive_pushes_in_every_mode_and_each_token_has_the_version_that_sampled_it(
    mode: str, version: str, segment_tokens: int
) -> None:
    servers = FakeSglang(version), FakeSglang(version)
    async with fleet_with(0, *servers, mode=mode, settings={"segment_tokens": segment_tokens}) as fleet:
        taken: list[Generation] = []

        async def turns(session: str) -> None:
            while not taken or fleet.version < 4:
                taken.append(await sample(fleet, LONG, session))

        workers = [asyncio.create_task(turns(f"s{i}")) for i in range(8)]
        for push in range(1, 5):
            await async_until(lambda: any(server.running for server in servers))
            await fleet.update_weights(push, tensors(push))
        await asyncio.gather(*workers)
    assert fleet.version == 4
    assert all(len(each.tokens) == LONG and each.finish_reason == "length" for each in taken)
    assert_true(*taken)
    assert mode == "drain" or any(len(set(each.versions)) > 1 for each in taken)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_token_that_the_server_has_not_counted_yet_at_a_pause_has_the_version_that_sampled_it(
    mode: str,
) -> None:
    server = FakeSglang()
    server.overlap = True
    async with fleet_with(0, server, mode=mode) as fleet:
        server.hold_until(1)
        calls = [asyncio.create_task(sample(fleet, LONG, f"s{i}")) for i in range(4)]
        await async_until(lambda: len(server.running) == 4)
        await fleet.update_weights(1, tensors(1))
        taken = await asyncio.gather(*calls)
    assert_true(*taken)
    assert {*taken[0].versions} == {0, 1}


@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_an_update_flushes_while_it_loads_and_before_anything_is_served(mode: str) -> None:
    """So the flush adds nothing to the time in which the server generates nothing."""
    server, flushed = FakeSglang(), asyncio.Event()
    load, flush = server._update_weights_from_disk, server._flush_cache

    async def slow_load(body: object) -> object:
        await flushed.wait()
        return await load(body)

    async def seen_flush(body: object) -> object:
        flushed.set()
        return await flush(body)

    server.answers |= {"update_weights_from_disk": slow_load, "flush_cache": seen_flush}
    async with fleet_with(0, server, mode=mode) as fleet:
        call = asyncio.create_task(sample(fleet, LONG))
        await async_until(lambda: server.running)
        await fleet.update_weights(1, tensors(1))
        assert_true(await call)


async def test_a_server_without_spans_is_updated_as_by_abort_and_never_flushed_under_requests() -> None:
    server = FakeSglang("0.5.17")
    async with fleet_with(0, server, mode="retract") as fleet:
        server.hold_until(1)
        call = asyncio.create_task(sample(fleet, LONG))
        await async_until(lambda: server.running)
        await fleet.update_weights(1, tensors(1))
        await call
    assert not {"pause_generation", "begin_weight_update"} & set(server.calls)
    assert "abort_request" in server.calls[server.calls.index("generate") :]


async def test_a_server_that_orders_requests_itself_loads_while_answers_are_on_their_way_and_flushes_behind_them() -> (
    None
):
    server, loaded = FakeSglang("0.5.17"), asyncio.Event()
    load, flush, generate = server._update_weights_from_disk, server._flush_cache, server._generate
    unanswered: list[str] = []
    flushed_under: list[int] = []

    async def seen_load(body: object) -> object:
        answer = await load(body)
        loaded.set()
        return answer

    async def late_answer(body: Any) -> object:
        unanswered.append(body["rid"])
        answer = await generate(body)
        await loaded.wait()
        unanswered.remove(body["rid"])
        return answer

    async def seen_flush(body: object) -> object:
        flushed_under.append(len(unanswered))
        return await flush(body)

    async with fleet_with(0, server, mode="abort") as fleet:
        loaded.clear()
        server.answers |= {"update_weights_from_disk": seen_load, "generate": late_answer, "flush_cache": seen_flush}
        calls = [asyncio.create_task(sample(fleet, LONG, f"s{i}")) for i in range(4)]
        await async_until(lambda: len(server.running) == 4)
        await fleet.update_weights(1, tensors(1))
        taken = await asyncio.gather(*calls)
        assert counter(fleet, "lost_segments") == 0
    assert_true(*taken)
    assert flushed_under == [0]


@pytest.mark.parametrize("until_aborted", [True, False])
async def test_a_request_that_comes_behind_an_update_which_was_sent_later_gives_no_token_of_it(
    until_aborted: bool,
) -> None:
    """The request is aborted while it waits, or refused because of the label of its answer, and sampled again."""
    server, held = FakeSglang("0.5.17"), asyncio.Event()
    generate = server._generate

    async def slow_to_arrive(body: Any) -> object:
        if not held.is_set():
            held.set()
            await async_until(lambda: server.loads)
        return await generate(body)

    async def slow_load() -> None:
        await async_until(lambda: server.aborted_in_wait if until_aborted else server.waiting)

    async with fleet_with(0, server, mode="abort") as fleet:
        server.answers["generate"], server.loading = slow_to_arrive, slow_load
        call = asyncio.create_task(sample(fleet, 20))
        await held.wait()
        await fleet.update_weights(1, tensors(1))
        got = await call
        lost = counter(fleet, "lost_segments")
        faults = counter(fleet, "server_faults")
    assert_true(got)
    assert {*got.versions} == {1}
    assert lost == (0 if until_aborted else 1)
    assert faults == 0


async def test_where_prefixes_are_not_flushed_each_session_keeps_those_of_the_version_under_which_it_began() -> None:
    server = FakeSglang()
    async with fleet_with(0, server, mode="in_place") as fleet:
        server.calls.clear()
        await sample(fleet, session="long")
        await fleet.update_weights(1, tensors(1))
        await sample(fleet, session="long")
        await sample(fleet, session="later")
        fleet.release("long")
        await sample(fleet, session="long")
    assert "flush_cache" not in server.calls
    old, *others = server.salts
    assert old is not None
    assert others == [old, server.label, server.label]
    assert old != server.label


async def test_a_turn_that_an_update_in_place_cuts_goes_on_with_the_prefixes_that_it_has() -> None:
    server = FakeSglang("0.5.17")
    async with fleet_with(0, server, mode="in_place") as fleet:
        server.calls.clear()
        server.hold_until(1)
        call = asyncio.create_task(sample(fleet, LONG))
        await async_until(lambda: server.running and len(server.running[0].pairs) > 3)
        await fleet.update_weights(1, tensors(1))
        got = await call
        assert counter(fleet, "cut_segments") == 1
        assert counter(fleet, "recomputed_tokens") == 0
    assert_true(got)
    assert {*got.versions} == {0, 1}
    assert "flush_cache" not in server.calls
    assert len(server.salts) == 2
    assert len(set(server.salts)) == 1


async def test_a_server_that_was_lost_forgets_its_prefixes_which_half_an_update_may_have_computed() -> None:
    server = FakeSglang()
    async with fleet_with(0, server, mode="in_place") as fleet:
        server.calls.clear()
        server.refuses.add("model_info")
        server.refuses.add("get_model_info")
        await async_until(lambda: not counter(fleet, "servers_ready"))
        server.refuses.clear()
        await async_until(lambda: counter(fleet, "servers_ready"))
    assert server.calls.count("flush_cache") == 1


async def test_a_version_that_cannot_be_written_ends_no_turn_and_follows_once_there_is_room(tmp_path: Path) -> None:
    server, full = FakeSglang(), False

    def write_config(folder: Path) -> None:
        if full:
            raise OSError(28, "No space left on device")

    async with fleet_with(1, server, folders=Folders(tmp_path, write_config, OWN_RUN)) as fleet:
        server.holds = lambda _: not fleet._last_fault()
        call = asyncio.create_task(sample(fleet, LONG))
        await async_until(lambda: server.running)
        full = True
        update = asyncio.create_task(fleet.update_weights(2, tensors(2)))
        running, later = await call, await sample(fleet, 3, "later")
        assert {*running.versions, *later.versions} == {1}
        server.holds, full = lambda _: False, False
        await update
        assert counter(fleet, "lost_segments") == counter(fleet, "server_faults") == 0
        assert not fleet._last_fault()
        assert_true(running, later, await sample(fleet, 3, "last"))
