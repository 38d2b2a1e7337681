"""Measures the token rate of benchmarks.gpu_loop's workloads without a learner: the upper limit of the fleet's rate.

A bare client plays the drawn episodes, the same number at once. It keeps whole conversations as random tokens, waits as
the agent does, and requests log-probs without reading them. Episodes of a group share their prompt, as in a run.

Each server has a client of its own, in a process of its own: `python -m benchmarks.loop_bare JSON`. For the embedded
engine that process has the engine, too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace

import aiohttp
import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import EngineConfig, ModelConfig
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.engine.opening import SWITCH_S
from asyncrl.engine.sglang.requests import generate_body
from asyncrl.errors import AsyncrlError
from asyncrl.machine.child import ending_with_parent
from asyncrl.types import Sampling
from benchmarks.loop_workload import TEMPLATE_TOKENS, DrawnTurn, Workload

SOCKET_S = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one client.

    - `workload`: a name in loop_workload.yaml
    - `stop`: the tokens that end a turn; empty: the policy ends no turn
    - `at_once`, `group`: the number of episodes at once, and of those that share a prompt
    - `warm_s`, `measured_s`: the seconds before the measurement, and of the measurement
    - `url`: the server; empty: an embedded engine in this process
    - `model`, `dtype`: the folder of the embedded engine's model, and its dtype
    """

    workload: str
    vocabulary: int
    stop: Sequence[int]
    at_once: int
    group: int
    warm_s: float
    measured_s: float
    url: str = ""
    model: str = ""
    dtype: str = "float32"


@dataclass(slots=True)
class Answers:
    """Answered requests: the begin, the end and the tokens of each."""

    spans: list[tuple[float, float, int]] = field(default_factory=list)

    def rate(self, begin: float, end: float) -> float:
        """Tokens a second between two times. An answer of thousands of tokens arrives in one piece, so its tokens are
        spread evenly over its request."""
        tokens = 0.0
        for start, stop, count in self.spans:
            overlap = min(stop, end) - max(start, begin)
            tokens += count * max(0.0, overlap) / (stop - start)
        return tokens / (end - begin)


async def bare_rate(load: Load, urls: Sequence[str]) -> float:
    """Tokens a second of `load`, which is divided among servers; without `urls` it has an embedded engine. Raises
    AsyncrlError: a client failed."""
    parts = [load]
    if urls:
        shares = [len(range(number, load.at_once, len(urls))) for number in range(len(urls))]
        parts = [replace(load, url=url, at_once=share) for url, share in zip(urls, shares, strict=True) if share]
    return sum(await asyncio.gather(*map(_in_process, parts)))


async def _in_process(load: Load) -> float:
    command = [sys.executable, "-m", __name__, json.dumps(asdict(load))]
    process = await asyncio.create_subprocess_exec(
        *ending_with_parent(command, signal.SIGTERM),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise AsyncrlError(f"the bare client of {load.url or 'the embedded engine'} ended with {process.returncode}")
    return float(printed.split()[-1])


async def client_rate(load: Load) -> float:
    """Tokens a second of one client, from `warm_s` after the start for `measured_s` seconds.

    Waits for running requests at the end, since their tokens count in part. Raises ExceptionGroup: requests failed.
    """
    workload = Workload.named(load.workload)
    async with _opened(load, workload) as sampler:
        answers, names, begun = Answers(), itertools.count(), time.perf_counter()
        end = begun + load.warm_s + load.measured_s

        async def episodes() -> None:
            while time.perf_counter() < end:
                await _episode(sampler, load, workload, next(names), answers, end)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(load.at_once):
                tasks.create_task(episodes())
    return answers.rate(begun + load.warm_s, end)


async def _episode(
    sampler: _Server | _Engine, load: Load, workload: Workload, at: int, answers: Answers, end: float
) -> None:
    """Play episode number `at`, but begin no turn after `end`."""
    name, of_group = f"bare.{load.url}.{at}", random.Random(f"{load.url} {at // load.group}")
    drawn, known = random.Random(name), range(load.vocabulary)
    context = of_group.choices(known, k=workload.prompt_tokens + TEMPLATE_TOKENS)
    turns = workload.episode(name)
    for number, turn in enumerate(turns):
        await asyncio.sleep(turns[number - 1].wait_s if number else 0.0)
        if time.perf_counter() > end:
            break
        start = time.perf_counter()
        sampled = await sampler.sample(name, np.asarray(context, np.int32), turn)
        answers.spans.append((start, time.perf_counter(), len(sampled)))
        context += [*sampled, *drawn.choices(known, k=turn.message + TEMPLATE_TOKENS)]
    sampler.release(name)


class _Server:
    """Samples on the server of `load`."""

    def __init__(self, load: Load, session: aiohttp.ClientSession) -> None:
        self._load = load
        self._session = session

    async def sample(self, name: str, tokens: NDArray[np.int32], turn: DrawnTurn) -> Sequence[int]:
        """Sample a turn. Raises ValueError: the server refused the request."""
        sampling = Sampling(1.0, turn.tokens)
        body = generate_body(uuid.uuid4().hex, tokens, sampling, self._load.stop, None)
        body["sampling_params"]["ignore_eos"] = not self._load.stop
        async with self._session.post(f"{self._load.url}/generate", json=body) as response:
            answer = await response.read()
        if response.status != 200:
            raise ValueError(f"the server at {self._load.url} answered {response.status}: {answer[:300]!r}")
        found: Sequence[int] = json.loads(answer)["output_ids"]
        return found

    def release(self, name: str) -> None:
        """Do nothing: a server drops the cache of an old conversation itself."""


class _Engine:
    """Samples on an embedded engine."""

    def __init__(self, load: Load, engine: EmbeddedEngine) -> None:
        self._load = load
        self._engine = engine

    async def sample(self, name: str, tokens: NDArray[np.int32], turn: DrawnTurn) -> Sequence[int]:
        sampled = await self._engine.generate(tokens, Sampling(1.0, turn.tokens), self._load.stop, name)
        found: Sequence[int] = sampled.tokens.tolist()
        return found

    def release(self, name: str) -> None:
        self._engine.release(name)


@asynccontextmanager
async def _opened(load: Load, workload: Workload) -> AsyncIterator[_Server | _Engine]:
    """The server of `load`, or an embedded engine with a slot for each episode."""
    if load.url:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SOCKET_S)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            yield _Server(load, session)
        return
    config = EngineConfig(slots=load.at_once, max_length=workload.longest_episode)
    engine = EmbeddedEngine.load(ModelConfig(path=load.model, dtype=load.dtype), config, initial_version=0)
    if engine.on_gpu:
        sys.setswitchinterval(SWITCH_S)
    try:
        yield _Engine(load, engine)
    finally:
        await engine.close()


def main() -> None:
    print(asyncio.run(client_rate(Load(**json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
