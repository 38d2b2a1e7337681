"""Measures the embedded engine on a GPU, with passes that CUDA graphs replay and with passes of the usual kind.

Models have random weights. Every slot plays episodes one after the other. With `--turns long` an episode has 512 tokens
of its own and one turn of 512.

With `--turns short` it has a prompt of 300 tokens, of which all share 200 and groups of 8 share the rest. It has five
turns of 20 to 60 sampled tokens, and 20 tokens of a tool's result between two turns.

Rates are of `--seconds` after a warm-up. Then the weights change under load, with a canary. `stop` is the time from the
end of the last pass with old weights until the next pass may start. The memory is what torch has taken from the GPU,
once the engine is open and after the last change of weights; weights and cache are the least that it needs.

`--busy-ms` adds processor time to each turn in the thread of the episodes, as a real actor does: both threads share
Python's interpreter lock.

    python -m benchmarks.engine_gpu --shapes 135M 0.6B --slots 512 256
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config.schema import EngineConfig
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.engine.opening import SWITCH_S
from asyncrl.types import Sampling
from asyncrl.weights.canary import Canary, CanaryCheck, canary_tokens
from benchmarks.record import write_result
from benchmarks.shapes import SHAPES, make_model

LENGTH, SHARED, PROMPT, RESULT, TURNS, GROUP = 2048, 200, 300, 20, 5, 8
LONG = 512
WARM_UP_S = {True: 2.0, False: 5.0}
SWITCHES = 10
GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """One case: rates, the seconds until the engine was ready, and the stops at weight switches in milliseconds. Memory
    is in GiB: of weights and cache, and what torch has taken before and after the switches."""

    shape: str
    slots: int
    turns: str
    graphs: bool
    busy_ms: float
    tokens_per_s: float
    turns_per_s: float
    open_s: float
    stop_ms: list[float]
    least_gib: float
    open_gib: float
    switched_gib: float


class Load:
    """Episodes in all slots of an engine, until `close`."""

    def __init__(self, engine: EmbeddedEngine, slots: int, turns: str, vocabulary: int, busy_ms: float) -> None:
        self._engine, self._turns, self._vocabulary, self._busy_s = engine, turns, vocabulary, busy_ms / 1e3
        self._shared = self._draw(np.random.default_rng(0), SHARED)
        self.finished = 0
        self._tasks = [asyncio.create_task(self._play(slot)) for slot in range(slots)]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _play(self, slot: int) -> None:
        rng = np.random.default_rng(slot)
        for number in itertools.count():
            group = np.random.default_rng((slot // GROUP, number))
            short = self._turns == "short"
            own = self._draw(group, PROMPT - SHARED) if short else self._draw(rng, LONG)
            tokens = np.concatenate([self._shared, own]) if short else own
            for _ in range(TURNS if short else 1):
                limit = int(rng.integers(20, 61)) if short else LONG
                got = await self._engine.generate(tokens, Sampling(1.0, limit), (), f"{slot}.{number}")
                self.finished += 1
                _keep_busy(self._busy_s)
                tokens = np.concatenate([tokens, got.tokens, self._draw(rng, RESULT)])
            self._engine.release(f"{slot}.{number}")

    def _draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int32]:
        return rng.integers(0, self._vocabulary, count).astype(np.int32)

    async def rates(self, seconds: float) -> tuple[float, float]:
        """Tokens and turns a second over the next `seconds`."""
        tokens, turns, started = self._engine.stats().tokens, self.finished, time.perf_counter()
        await asyncio.sleep(seconds)
        spent = time.perf_counter() - started
        return (self._engine.stats().tokens - tokens) / spent, (self.finished - turns) / spent


def _keep_busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(100))


def canary(model: Any, vocabulary: int) -> Canary:
    ids = canary_tokens(0, vocabulary)
    given = torch.tensor(ids, device=model.device)
    with torch.no_grad():
        logits = model(given[None], use_cache=False).logits[0, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, given[1:, None])[:, 0]
    return Canary(ids, tuple(logprobs.tolist()), str(model.dtype)[6:])


def timed_stops(engine: EmbeddedEngine) -> list[float]:
    """A list to which each weight switch adds its milliseconds, without the end of the pass before."""
    stops: list[float] = []
    settle, switch = engine._passes.settle, engine._switch
    settled = [0.0]

    def settle_first() -> Any:
        found = settle()
        settled[0] = time.perf_counter()
        return found

    def timed(version: int, staged: Mapping[str, torch.Tensor], check: CanaryCheck | None) -> None:
        switch(version, staged, check)
        stops.append((time.perf_counter() - settled[0]) * 1e3)

    engine._passes.settle, engine._switch = settle_first, timed  # type: ignore[method-assign]
    return stops


async def measure(shape: str, slots: int, turns: str, graphs: bool, seconds: float, busy_ms: float) -> Row:
    vocabulary = SHAPES[shape].vocabulary
    model = make_model(shape, torch.bfloat16, "cuda")
    check = canary(model, vocabulary)
    weights: Mapping[str, torch.Tensor] = {name: each.detach().cpu() for name, each in model.named_parameters()}
    started = time.perf_counter()
    engine = EmbeddedEngine(model, EngineConfig(slots=slots, max_length=LENGTH), initial_version=0, static=graphs)
    open_s = time.perf_counter() - started
    torch.cuda.empty_cache()
    open_bytes = torch.cuda.memory_reserved()
    stops = timed_stops(engine)
    load = Load(engine, slots, turns, vocabulary, busy_ms)
    try:
        await asyncio.sleep(WARM_UP_S[graphs])
        tokens_per_s, turns_per_s = await load.rates(seconds)
        for version in range(1, SWITCHES + 1):
            await engine.update_weights(version, weights, CanaryCheck(version, check, "zmq"))
            await asyncio.sleep(0.5)
    finally:
        await load.close()
        await engine.close()
    least_bytes = sum(each.nbytes for each in (*weights.values(), engine._passes._cache._stored))
    memory = (each / GIB for each in (least_bytes, open_bytes, torch.cuda.memory_reserved()))
    return Row(shape, slots, turns, graphs, busy_ms, tokens_per_s, turns_per_s, open_s, stops, *memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["135M", "0.6B"], choices=list(SHAPES))
    parser.add_argument("--slots", nargs="+", type=int, default=[512, 256], help="slots for each shape")
    parser.add_argument("--turns", nargs="+", default=["short", "long"], choices=["short", "long"])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--busy-ms", type=float, default=0.0, help="processor time of a turn in the actor")
    parser.add_argument("--usual", action="store_true", help="also measure passes without graphs")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    rows = []
    for (shape, slots), turns in itertools.product(zip(options.shapes, options.slots, strict=True), options.turns):
        for graphs in (True, False) if options.usual else (True,):
            row = asyncio.run(measure(shape, slots, turns, graphs, options.seconds, options.busy_ms))
            gc.collect()
            torch.cuda.empty_cache()
            rows.append(row)
            print(
                f"{row.shape:6} {row.slots:4} slots {row.turns:5} {'graphs' if row.graphs else 'usual ':6} "
                f"{row.tokens_per_s:8.0f} tokens/s {row.turns_per_s:6.0f} turns/s, ready in {row.open_s:.1f} s, "
                f"stop {statistics.median(row.stop_ms):.1f} ms, memory {row.open_gib:.1f} GiB, after "
                f"{SWITCHES} switches {row.switched_gib:.1f}, weights and cache {row.least_gib:.1f}"
            )
    name = "engine-gpu" if not options.busy_ms else f"engine-gpu-busy-{options.busy_ms:g}"
    path = write_result(name, [asdict(row) for row in rows], torch.cuda.get_device_name())
    print(f"written to {path}")


if __name__ == "__main__":
    main()
