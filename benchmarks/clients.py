"""Clients that post requests: asyncrl's fleet, and a bare asyncio client that ignores the answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.sglang.requests import generate_body
from asyncrl.types import Sampling

Client = Callable[[NDArray[np.int32], int], Awaitable[None]]
"""A function that samples a number of tokens after a prompt. Raises an error if it gets another number."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests with `prompt` random tokens, each for `output` sampled tokens."""

    prompt: int
    output: int
    vocabulary: int

    def prompts(self, rng: np.random.Generator, count: int) -> list[NDArray[np.int32]]:
        """Return distinct prompts, so that no prefix is cached."""
        return list(rng.integers(0, self.vocabulary, (count, self.prompt), dtype=np.int32))


def fleet_client(fleet: Fleet) -> Client:
    """Return a client that requests tokens through the fleet, as an episode of one turn does."""
    numbers = itertools.count()
    run = uuid.uuid4().hex

    async def generate(tokens: NDArray[np.int32], count: int) -> None:
        session = f"{run}.{next(numbers)}"
        generation = await fleet.generate(tokens, Sampling(1.0, count), (), session)
        fleet.release(session)
        if len(generation.tokens) != count:
            raise ValueError(f"asked for {count} tokens, got {len(generation.tokens)}")

    return generate


@asynccontextmanager
async def bare_client(urls: Sequence[str], logprobs: bool) -> AsyncIterator[Client]:
    """Yield a client that posts the same requests to the servers in turn, with or without log-probs, and drops the
    answers."""
    addresses = itertools.cycle(urls)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def generate(tokens: NDArray[np.int32], count: int) -> None:
            body: dict[str, Any] = generate_body(uuid.uuid4().hex, tokens, Sampling(1.0, count), (), None)
            body["return_logprob"] = logprobs
            body["sampling_params"]["ignore_eos"] = True
            headers = {"Content-Type": "application/json"}
            data = json.dumps(body).encode()
            async with session.post(f"{next(addresses)}/generate", data=data, headers=headers) as response:
                answer = await response.read()
            if response.status != 200 or f'"completion_tokens":{count}'.encode() not in answer:
                raise ValueError(f"asked for {count} tokens, got {answer[:300]!r}")

        yield generate


@dataclass(frozen=True, slots=True)
class Run:
    """The wall-clock and processor seconds of a run."""

    seconds: float
    cpu_s: float


async def run_all(client: Client, prompts: Sequence[NDArray[np.int32]], output: int, concurrency: int) -> Run:
    """Post all requests, `concurrency` at once."""
    waiting = iter(prompts)

    async def work() -> None:
        for prompt in waiting:
            await client(prompt, output)

    begun, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return Run(time.perf_counter() - begun, time.process_time() - cpu)
