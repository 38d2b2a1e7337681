"""A turn in segments is the turn of one request; a server that dies takes no more than a segment of it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncrl.types import Sampling
from tests.actor.engine.fleet.fakes import FakeSglang, assert_true, fleet_over, ids, run, serving, tensors
from tests.helpers import async_until

STOP = 99


def said(position: int) -> int:
    """A text that is known: what stands at each position, whoever asks and in however many requests."""
    return STOP if position == 103 else position * 7 % 90


@pytest.mark.parametrize(("limit", "finish"), [(60, "length"), (64, "length"), (100, "length"), (300, "stop")])
def test_a_turn_is_the_same_with_any_segment_length(limit: int, finish: str) -> None:
    async def turn(segment_tokens: int) -> Any:
        server = FakeSglang(says=said)
        async with serving(server), fleet_over(server, segment_tokens=segment_tokens) as fleet:
            await fleet.update_weights(5, tensors(5))
            got = await fleet.generate(ids(), Sampling(0.0, limit), (STOP,), "s")
            return got, server.limits, fleet.stats().counters

    whole, limits, _ = run(lambda: turn(0))
    assert limits == [limit]
    assert whole.finish_reason == finish
    for segment_tokens in (1, 16, 32, 101, 1000):
        got, limits, counters = run(lambda length=segment_tokens: turn(length))
        for name in ("tokens", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(got, name), getattr(whole, name))
        assert got.finish_reason == finish
        assert max(limits) <= segment_tokens
        assert counters["segments"] == len(limits) == -(-len(whole.tokens) // segment_tokens)
        assert counters["cut_segments"] == counters["lost_segments"] == 0


def test_every_segment_goes_on_behind_the_last_one_on_the_same_server() -> None:
    servers = FakeSglang(says=said), FakeSglang(says=said)

    async def scenario() -> None:
        async with serving(*servers), fleet_over(*servers, segment_tokens=30) as fleet:
            await fleet.update_weights(0, tensors(0))
            await async_until(lambda: fleet.stats().counters["servers_ready"] == 2)
            await asyncio.gather(*(fleet.generate(ids(i, 1), Sampling(1.0, 100), (), f"s{i}") for i in range(4)))

    run(scenario)
    for server in servers:
        homed = {prompt[0] for prompt in server.prompts}
        assert len(homed) == 2
        text = [said(position) for position in range(2, 92)]
        for name in homed:
            prompts = [prompt for prompt in server.prompts if prompt[0] == name]
            assert prompts == [[name, 1, *text[:count]] for count in (0, 30, 60, 90)]


def test_a_server_that_dies_takes_no_more_than_a_segment_of_each_turn() -> None:
    servers = FakeSglang(), FakeSglang()
    segment, turns = 20, 8

    async def scenario() -> Any:
        async with serving(*servers), fleet_over(*servers, segment_tokens=segment) as fleet:
            await fleet.update_weights(3, tensors(3))
            await async_until(lambda: fleet.stats().counters["servers_ready"] == 2)
            calls = [asyncio.create_task(fleet.generate(ids(), Sampling(1.0, 300), (), f"s{i}")) for i in range(turns)]
            await async_until(lambda: len(servers[0].running) == 4 and servers[0].sampled > 4 * 5 * segment)
            await servers[0].die()
            return await asyncio.gather(*calls), fleet.stats().counters["lost_segments"]

    got, lost = run(scenario)
    for each in got:
        assert_true(each)
        assert len(each.tokens) == 300
    assert 0 < lost <= 4
    assert servers[0].sampled + servers[1].sampled - turns * 300 <= lost * segment


def test_a_length_that_is_the_servers_own_ends_the_turn() -> None:
    server = FakeSglang()

    async def scenario() -> Any:
        async with serving(server), fleet_over(server, segment_tokens=200) as fleet:
            await fleet.update_weights(1, tensors(1))
            call = asyncio.create_task(fleet.generate(ids(), Sampling(1.0, 300), (), "s"))
            await async_until(lambda: server.running and len(server.running[0].pairs) > 3)
            server._end(server.running[0], "length")
            return await call

    got = run(scenario)
    assert got.finish_reason == "length"
    assert len(got.tokens) < 200
    assert len(server.prompts) == 1


def test_a_turn_that_is_released_keeps_its_segments() -> None:
    server = FakeSglang()

    async def scenario() -> Any:
        async with serving(server), fleet_over(server, segment_tokens=20) as fleet:
            await fleet.update_weights(1, tensors(1))
            call = asyncio.create_task(fleet.generate(ids(), Sampling(1.0, 100_000), (), "s"))
            await async_until(lambda: len(server.prompts) > 3)
            fleet.release("s")
            got = await call
            await async_until(lambda: not server.running)
            return got

    got = run(scenario)
    assert got.finish_reason == "abort"
    assert len(got.tokens) >= 60
    assert len(got.tokens) % 20 == 0
    assert_true(got)
