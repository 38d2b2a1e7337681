"""Experts of tokens through a fleet: asked for once a token, and only those that sampled are kept."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np

from asyncrl.engine.base import Generation
from asyncrl.modelling.routing import RoutingShape
from asyncrl.types import Sampling
from tests.engine.fleet.fakes import (
    FakeSglang,
    counter,
    experts_at,
    fleet_over,
    fleet_with,
    ids,
    sample,
    serving,
    tensors,
)
from tests.helpers import async_until

SHAPE = RoutingShape((1, 2), 3, 300, 2)


def telling() -> FakeSglang:
    server = FakeSglang()
    server.routing = SHAPE
    return server


def known(got: Generation) -> dict[int, Any]:
    """The experts of each token by its place; a place comes once."""
    found: dict[int, Any] = {}
    for each in got.routing:
        rows = SHAPE.unpack(each.rows)
        places = {each.start + index: row.tolist() for index, row in enumerate(rows) if row.min() >= 0}
        assert not found.keys() & places.keys()
        found |= places
    return found


def expected(places: range, weights: int) -> dict[int, Any]:
    rows = experts_at(SHAPE, np.array(places), weights)[:, list(SHAPE.layers)]
    return dict(zip(places, rows.tolist(), strict=True))


async def test_a_sessions_turns_in_segments_tell_the_experts_of_each_token_once() -> None:
    server = telling()
    async with fleet_with(5, server, routing=SHAPE, settings={"segment_tokens": 4}) as fleet:
        first = await fleet.generate(ids(1, 2, 3), Sampling(1.0, 10), (), "s")
        assert known(first) == expected(range(12), 5)
        longer = np.concatenate([ids(1, 2, 3), first.tokens, ids(8, 9)])
        second = await fleet.generate(longer, Sampling(1.0, 5), (), "s")
        assert known(second) == expected(range(12, 19), 5)
        assert server.routed_from == [0, 6, 10, 12, 18]
        assert counter(fleet, "routed_tokens") == 19
        assert counter(fleet, "routed_bytes") == 19 * SHAPE.width
        # A session that goes back, and one that is new, need all of them.
        assert known(await fleet.generate(ids(1, 2), Sampling(1.0, 3), (), "s")) == expected(range(4), 5)
        fleet.release("s")
        assert known(await fleet.generate(longer, Sampling(1.0, 3), (), "s")) == expected(range(17), 5)


async def test_experts_that_a_push_had_computed_anew_are_not_those_that_sampled() -> None:
    server = telling()
    async with fleet_with(5, server, routing=SHAPE) as fleet:
        server.hold_until(6)
        call = asyncio.create_task(sample(fleet, 60))
        await async_until(lambda: server.running and len(server.running[0].pairs) > 5)
        await fleet.update_weights(6, tensors(6))
        got = await call
    before = int((got.versions == 5).sum())
    assert 5 < before < 60
    assert known(got) == expected(range(3), 6) | expected(range(3 + before, 62), 6)


async def test_with_a_kept_cache_all_tokens_keep_the_experts_that_they_were_computed_by() -> None:
    server = telling()
    async with fleet_with(5, server, routing=SHAPE, mode="in_place") as fleet:
        server.hold_until(6)
        call = asyncio.create_task(sample(fleet, 60))
        await async_until(lambda: server.running and len(server.running[0].pairs) > 5)
        await fleet.update_weights(6, tensors(6))
        got = await call
    assert len(known(got)) == 62


async def test_an_interrupted_turn_goes_on_and_asks_for_the_experts_that_it_lacks() -> None:
    server = telling()
    async with fleet_with(5, server, routing=SHAPE, mode="abort") as fleet:
        server.hold_until(6)
        call = asyncio.create_task(sample(fleet, 60))
        await async_until(lambda: server.running and len(server.running[0].pairs) > 5)
        await fleet.update_weights(6, tensors(6))
        got = await call
    before = int((got.versions == 5).sum())
    # The last token of the first request was not computed before the second one.
    assert known(got) == expected(range(3 + before - 1), 5) | expected(range(3 + before - 1, 62), 6)
    assert all(left.end == right.start for left, right in pairwise(got.routing))


async def test_experts_that_are_none_of_the_models_are_counted_and_the_turn_goes_on() -> None:
    server = telling()
    server.routing = RoutingShape((1, 2), 3, 400, 2)
    async with fleet_with(90, server, routing=RoutingShape((1, 2), 3, 50, 2)) as fleet:
        got = await sample(fleet, 5)
        assert len(got.tokens) == 5
        assert not got.routing
        assert counter(fleet, "routed_refused") == 1


async def test_a_server_that_does_not_tell_experts_is_not_used_where_they_are_wanted() -> None:
    silent, server = FakeSglang(), telling()
    async with serving(silent, server), fleet_over(silent, server, routing=SHAPE) as fleet:
        await fleet.update_weights(5, tensors(5))
        assert known(await sample(fleet, 5))
        assert silent.sampled == 0
        await async_until(lambda: "--enable-return-routed-experts" in fleet._last_fault())
