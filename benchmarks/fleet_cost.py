"""The processor time of asyncrl's fleet over a server that answers immediately: see benchmarks.rollout."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl.engine.fleet.fleet import Fleet
from benchmarks.clients import Load, bare_client, fleet_client
from benchmarks.fleets import Policy, Push, fleet_over
from benchmarks.instant_server import VOCABULARY, instant_server
from benchmarks.throughput import compare, processor_cost

LENGTHS = (16, 512)
PROMPT = 512
CONCURRENCY = 256
REQUESTS = 1024
EPISODES = 256
TURNS = 4


@asynccontextmanager
async def instant_fleet(turns: Sequence[Sequence[int]] = ()) -> AsyncIterator[tuple[str, Fleet]]:
    """A fleet over a server that answers immediately, and that server's URL. `turns` are its answers in episodes."""
    with tempfile.TemporaryDirectory() as name, instant_server(turns) as url:
        policy = Policy.of_one_number(Path(name), VOCABULARY)
        async with fleet_over([url], policy, 1024, Push(), Path(name)) as opened:
            yield url, opened.fleet


async def measure(rounds: int) -> dict[str, Any]:
    """Measure the processor time of fleet and bare client by request and token, and tokens a second of episodes."""
    async with instant_fleet() as (url, fleet), bare_client([url], logprobs=True) as bare:
        clients = {"fleet": fleet_client(fleet), "bare": bare}
        short, long = [
            await compare(clients, Load(PROMPT, length, VOCABULARY), CONCURRENCY, REQUESTS, rounds)
            for length in LENGTHS
        ]
    return {
        "concurrency": CONCURRENCY,
        "prompt_tokens": PROMPT,
        **{name: processor_cost(short[name], long[name], REQUESTS, LENGTHS) for name in clients},
        f"episodes of {TURNS} turns": [await episodes(length, rounds) for length in (128, 512)],
    }


async def episodes(turn_tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second that one core can drive in whole episodes."""
    from benchmarks.episodes import Shape, episode_client, turn_of

    tokens = TURNS * turn_tokens
    async with instant_fleet([turn_of(turn_tokens)]) as (_, fleet):
        play = episode_client(fleet, Shape(TURNS, turn_tokens))
        load = Load(PROMPT, tokens, VOCABULARY)
        runs = (await compare({"episodes": play}, load, CONCURRENCY, EPISODES, rounds))["episodes"]
    cpu_s = statistics.median(run.cpu_s for run in runs) / EPISODES
    return {
        "turn_tokens": turn_tokens,
        "us_per_turn": round(cpu_s / TURNS * 1e6),
        "tokens_per_s_of_one_core": round(tokens / cpu_s),
    }
