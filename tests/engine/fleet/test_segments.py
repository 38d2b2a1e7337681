"""A turn in segments is the same as the turn of one request."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncrl.engine.base import PlacedImage
from asyncrl.types import Sampling
from tests.engine.fleet.fakes import FakeSglang, counter, fleet_with, ids, sample
from tests.helpers import async_until

STOP = 99


def said(position: int) -> int:
    """The token at each position of a known text, which does not depend on the requests."""
    return STOP if position == 103 else position * 7 % 90


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "finish"), [(60, "length"), (64, "length"), (100, "length"), (300, "stop")])
async def test_a_turn_is_the_same_with_any_segment_length(limit: int, finish: str) -> None:
    expected = [said(position) for position in range(3, 3 + min(limit, 101))]
    for segment_tokens in (0, 1, 16, 32, 101, 1000):
        server = FakeSglang(says=said)
        async with fleet_with(5, server, settings={"segment_tokens": segment_tokens}) as fleet:
            got = await fleet.generate(ids(), Sampling(0.0, limit), (STOP,), "s")
            counts = [counter(fleet, name) for name in ("segments", "cut_segments", "lost_segments")]
        assert got.tokens.tolist() == expected
        assert set(got.logprobs) == {-5.0}
        assert set(got.versions) == {5}
        assert got.finish_reason == finish
        length = segment_tokens or limit
        assert max(server.limits) <= length
        assert counts == [len(server.limits), 0, 0] == [-(-len(expected) // length), 0, 0]


async def test_every_segment_goes_on_behind_the_last_one_on_the_same_server() -> None:
    servers = FakeSglang(says=said), FakeSglang(says=said)
    async with fleet_with(0, *servers, settings={"segment_tokens": 30}) as fleet:
        await asyncio.gather(*(fleet.generate(ids(i, 1), Sampling(1.0, 100), (), f"s{i}") for i in range(4)))
    text = [said(position) for position in range(2, 92)]
    for server in servers:
        sessions = {prompt[0] for prompt in server.prompts}
        assert len(sessions) == 2
        for name in sessions:
            prompts = [prompt for prompt in server.prompts if prompt[0] == name]
            assert prompts == [[name, 1, *text[:count]] for count in (0, 30, 60, 90)]


async def test_where_a_seed_decides_what_is_sampled_each_session_has_one_of_its_own() -> None:
    # Without a seed, such a server takes the same one for each request. As happened in verl and others, all members of
    # a group were then the same episode, and nothing was learned.
    async def seeds(by_seed: bool, run: int) -> dict[int, set[int | None]]:
        server = FakeSglang(says=said)
        server.more_info = {"enable_deterministic_inference": by_seed}
        async with fleet_with(0, server, settings={"segment_tokens": 30, "seed": run}) as fleet:
            calls = (fleet.generate(ids(i, 1), Sampling(1.0, 100), (), f"t000000000.{i}.0/1") for i in range(4))
            await asyncio.gather(*calls)
        pairs = [(prompt[0], seed) for prompt, seed in zip(server.prompts, server.seeds, strict=True)]
        return {member: {seed for each, seed in pairs if each == member} for member in range(4)}

    assert await seeds(by_seed=False, run=3) == {member: {None} for member in range(4)}, "older servers know no seeds"
    found = await seeds(by_seed=True, run=3)
    assert [len(each) for each in found.values()] == [1] * 4, "all segments of a turn continue with one seed"
    assert len(set.union(*found.values())) == 4
    assert found == await seeds(by_seed=True, run=3)
    assert set.union(*found.values()).isdisjoint(set.union(*(await seeds(by_seed=True, run=4)).values()))


async def test_a_length_that_is_the_servers_own_ends_the_turn() -> None:
    server = FakeSglang()
    async with fleet_with(1, server, settings={"segment_tokens": 200}) as fleet:
        call = asyncio.create_task(sample(fleet, 300))
        await async_until(lambda: server.running and len(server.running[0].pairs) > 3)
        server.finish(server.running[0], "length")
        got = await call
    assert np.all(got.tokens == 1)
    assert got.finish_reason == "length"
    assert len(got.tokens) < 200
    assert len(server.prompts) == 1


async def test_behind_images_a_turn_ends_where_a_request_ends_with_a_placeholder_that_the_policy_wrote() -> None:
    server = FakeSglang(says=lambda behind: 7 if behind == 4 else None)
    tokens, placed = np.array([1, 7, 2], np.int32), [PlacedImage(1, 2, b"", b"a file")]
    async with fleet_with(5, server, settings={"segment_tokens": 2}, marks=[7, 8]) as fleet:
        behind_image = await fleet.generate(tokens, Sampling(1.0, 6), (), "a", placed)
        without = await fleet.generate(tokens, Sampling(1.0, 6), (), "b")
    assert (behind_image.tokens.tolist(), behind_image.finish_reason) == ([5, 7], "length")
    assert len(without.tokens) == 6
