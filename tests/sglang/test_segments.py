"""Turns in segments over the real server: the same tokens as in one request, and exact log-probs."""

from __future__ import annotations

import asyncio

import numpy as np

from asyncrl.actor.engine.base import Generation
from asyncrl.types import Sampling
from tests.actor.engine.real import STOP_ID, policy, prompts, run
from tests.actor.engine.support import assert_exact, parameters
from tests.sglang.support import RealServer, fleet_of

STARTS = prompts(8, seed=1)


def test_greedy_turns_are_the_same_with_any_segment_length(server: RealServer) -> None:
    async def turns(segment_tokens: int) -> list[Generation]:
        await server.ready()
        async with fleet_of([server.url], segment_tokens=segment_tokens) as fleet:
            await fleet.update_weights(4, parameters(policy(4)))
            calls = (fleet.generate(start, Sampling(0.0, 100), (STOP_ID,), str(i)) for i, start in enumerate(STARTS))
            return await asyncio.gather(*calls)

    whole = run(lambda: turns(0))
    assert any(len(each.tokens) == 100 for each in whole)
    for segment_tokens in (1, 32, 99):
        for start, one, got in zip(STARTS, whole, run(lambda length=segment_tokens: turns(length)), strict=True):
            np.testing.assert_array_equal(got.tokens, one.tokens)
            assert got.finish_reason == one.finish_reason
            assert_exact({4: policy(4)}, start, got, 0.0)
