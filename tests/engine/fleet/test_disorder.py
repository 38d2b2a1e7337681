"""A fleet through a random mix of pushes, deaths, hangs and refusals: nothing waits for ever."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from asyncrl.engine.base import Generation
from asyncrl.engine.fleet import in_flight
from asyncrl.engine.sglang import server as sglang
from asyncrl.engine.sglang.routes import base
from asyncrl.errors import EngineError
from asyncrl.weights.canary import CanaryError
from tests.engine.fleet.fakes import (
    FakeSglang,
    assert_true,
    canary_check,
    fleet_over,
    run,
    sample,
    servers_ready,
    serving,
    tensors,
)

# A request for tokens may take any time, and ends with its episode at the latest.
CALLS = (
    *("flush_cache", "update_weights_from_disk", "pause_generation", "continue_generation"),
    *("abort_request", "health", "begin_weight_update", "model_info"),
)
FAULTS = 25
LIMIT_S = 0.5
"""The seconds of a call that hangs."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["abort", "drain", "in_place", "retract"])
def test_after_any_mix_of_deaths_hangs_and_refusals_every_turn_and_every_push_ends(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((sglang, "CONTROL_S"), (base, "CONTROL_S"), (in_flight, "ABORT_S")):
        monkeypatch.setattr(module, name, LIMIT_S)
    run(lambda: _disorder(mode, random.Random(mode)))


async def _disorder(mode: str, rng: random.Random) -> None:
    servers = [FakeSglang(version) for version in ("0.5.23", "0.5.17", "0.5.23")]
    over, turns = asyncio.Event(), list[Generation]()

    async def play(session: str) -> None:
        while not over.is_set():
            turn = asyncio.create_task(sample(fleet, rng.randint(1, 40), session))
            if rng.random() < 0.1:
                await asyncio.sleep(rng.random() / 50)
                fleet.release(session)
            with suppress(EngineError):
                turns.append(await turn)

    async def push() -> int:
        version = 1
        while not over.is_set():
            version += 1
            with suppress(CanaryError):
                await fleet.update_weights(version, tensors(version), canary_check(version))
            await asyncio.sleep(rng.random() / 20)
        return version

    async with serving(*servers):
        limits = {server.url: LIMIT_S for server in servers}
        settings = {"drain_s": LIMIT_S, "segment_tokens": 3}
        async with fleet_over(*servers, mode=mode, limits_s=limits, settings=settings) as fleet:
            await fleet.update_weights(1, tensors(1))
            players = [asyncio.create_task(play(f"s{index}")) for index in range(4)]
            pusher = asyncio.create_task(push())
            for _ in range(FAULTS):
                await _fault(rng.choice(servers), rng)
            over.set()
            await asyncio.gather(*players)
            newest = await pusher
            if fleet.version < newest:
                # No server was left for it, which was told: servers go on trying.
                await fleet.update_weights(newest, tensors(newest), canary_check(newest))
            await servers_ready(fleet, len(servers))
    assert turns
    assert_true(*turns)
    assert not [crime for server in servers for crime in server.crimes]


async def _fault(server: FakeSglang, rng: random.Random) -> None:
    """One that is over when this returns; a call that hangs has no answer even then."""
    match rng.randrange(4):
        case 0:
            port = server.port
            await server.die()
            server.restart()
            await server.start(port)
        case 1:
            server.cut()
        case kind:
            calls, call = (server.hangs, server.refuses)[kind - 2], rng.choice(CALLS)
            calls.add(call)
            await asyncio.sleep(rng.random() / 5)
            calls.discard(call)
    await asyncio.sleep(rng.random() / 20)
