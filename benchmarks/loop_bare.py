"""Measures the token rate of benchmarks.gpu_loop's workload without asyncrl: the upper limit of the fleet's rate.

A bare asyncio client plays the same drawn episodes, the same number at once. It posts the whole conversation for each
turn, waits as the agent does, and requests log-probs without reading them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from asyncrl.engine.sglang.requests import generate_body
from asyncrl.types import Sampling
from benchmarks.loop_workload import Workload

TEMPLATE_TOKENS = 16
"""Tokens of a chat template around a message."""


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


async def bare_rate(
    urls: Sequence[str], workload: Workload, vocabulary: int, at_once: int, warm_s: float, measured_s: float
) -> float:
    """Tokens a second of `at_once` episodes, from `warm_s` after the start for `measured_s` seconds.

    Waits for running requests at the end, since their tokens count in part. Raises ExceptionGroup: requests failed.
    """
    answers, names, begun = Answers(), itertools.count(), time.perf_counter()
    end = begun + warm_s + measured_s
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def episodes(url: str) -> None:
            while time.perf_counter() < end:
                await _episode(session, url, workload, f"bare.{next(names)}", vocabulary, answers, end)

        async with asyncio.TaskGroup() as group:
            for number in range(at_once):
                group.create_task(episodes(urls[number % len(urls)]))
    return answers.rate(begun + warm_s, end)


async def _episode(
    session: aiohttp.ClientSession,
    url: str,
    workload: Workload,
    name: str,
    vocabulary: int,
    answers: Answers,
    end: float,
) -> None:
    drawn = random.Random(f"{workload.seed} {name} texts")
    context = drawn.choices(range(vocabulary), k=workload.prompt_tokens + TEMPLATE_TOKENS)
    turns = workload.episode(name)
    for number, turn in enumerate(turns):
        if number:
            await asyncio.sleep(turns[number - 1].wait_s)
        if time.perf_counter() > end:
            return
        tokens = np.asarray(context, np.int32)
        body = generate_body(uuid.uuid4().hex, tokens, Sampling(1.0, turn.tokens), (), None)
        body["sampling_params"]["ignore_eos"] = True
        start = time.perf_counter()
        async with session.post(f"{url}/generate", json=body) as response:
            answer = await response.read()
        if response.status != 200:
            raise ValueError(f"the server at {url} answered {response.status}: {answer[:300]!r}")
        sampled = json.loads(answer)["output_ids"]
        answers.spans.append((start, time.perf_counter(), len(sampled)))
        context += sampled
        context += drawn.choices(range(vocabulary), k=workload.observation_tokens + TEMPLATE_TOKENS)
