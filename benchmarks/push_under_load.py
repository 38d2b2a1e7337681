"""The cost of a push under constant load: see benchmarks.rollout."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.errors import AsyncrlError
from benchmarks.arrivals import Arrivals, PushCost, cost_of
from benchmarks.clients import fleet_client
from benchmarks.fleets import Policy, Push, fleet_over

log = logging.getLogger(__name__)

PATIENCE_S = 300.0
WINDOWS = 10
"""The number of windows into which each calm time is divided, to show how the rate changes."""


@dataclass(frozen=True, slots=True)
class PushLoad:
    """`requests` at once, each with `prompt` tokens and between `shortest` and `longest` sampled tokens.

    There are at least `calm_s` seconds before and after each of the `pushes`, more if the server is slow.
    """

    requests: int
    prompt: int
    shortest: int
    longest: int
    pushes: int
    calm_s: float


class Traffic:
    """Requests through the fleet: a new request follows each that ends. `lost` counts answers that failed or were too
    short."""

    def __init__(self, fleet: Fleet, load: PushLoad, vocabulary: int) -> None:
        self.arrivals = Arrivals()
        self.answered = 0
        self.lost = 0
        self._client = fleet_client(fleet)
        self._load = load
        self._vocabulary = vocabulary
        self._ending = False
        self._workers = [asyncio.create_task(self._work()) for _ in range(load.requests)]

    async def _work(self) -> None:
        rng = np.random.default_rng()
        load = self._load
        while not self._ending:
            prompt = rng.integers(0, self._vocabulary, load.prompt, dtype=np.int32)
            count = int(rng.integers(load.shortest, load.longest + 1))
            try:
                await self._client(prompt, count)
            except (AsyncrlError, ValueError):
                log.exception("a request was lost")
                self.lost += 1
            else:
                self.answered += 1
                self.arrivals.add(time.perf_counter(), count)

    async def settled_s(self) -> float:
        """Wait until every request has been replaced twice, and return the seconds of the second round."""
        times = []
        for turn in (1, 2):
            while self.answered + self.lost < turn * self._load.requests:
                await asyncio.sleep(0.01)
            times.append(time.perf_counter())
        return times[1] - times[0]

    async def end(self) -> None:
        """Wait for the running requests."""
        self._ending = True
        await asyncio.gather(*self._workers)

    def cancel(self) -> None:
        for worker in self._workers:
            worker.cancel()


async def measure(
    urls: Sequence[str], policy: Policy, load: PushLoad, push: Push, folder: Path
) -> dict[str, Any] | None:
    """The costs of pushes, with their medians first; None if the servers replace the mode by another."""
    context = load.prompt + load.longest
    async with fleet_over(urls, policy, context, push, folder) as opened:
        if push.mode in ("retract", "in_place") and not all(server.spans for server in opened.servers):
            return None
        traffic = Traffic(opened.fleet, load, policy.vocabulary)
        try:
            calm_s = max(load.calm_s, await traffic.settled_s())
            opened.switches.clear()
            opened.loads.clear()
            times = [await _pushed(opened.fleet, version, policy, calm_s) for version in range(1, load.pushes + 1)]
            await traffic.end()
        finally:
            traffic.cancel()
        counters, ways = opened.fleet.stats().counters, {server.route for server in opened.servers}
    costs = [cost_of(traffic.arrivals, begin, end, calm_s) for begin, end in times]
    begin, end = times[0]
    width = calm_s / WINDOWS
    windows = traffic.arrivals.windows(begin - calm_s, width, 2 * WINDOWS + int((end - begin) / width))
    return {
        **asdict(push),
        "ways_taken": sorted(ways),
        **_summary(costs, policy.nbytes),
        "switch_s": round(statistics.median(opened.switches), 4),
        "load_s": round(statistics.median(opened.loads), 4),
        "load_gigabytes_per_s": round(policy.nbytes / statistics.median(opened.loads) / 1e9, 4),
        "answered": traffic.answered,
        "lost": traffic.lost,
        "segments_cut": counters["cut_segments"],
        "segments_lost": counters["lost_segments"],
        "each_push": [{name: round(value, 4) for name, value in asdict(cost).items()} for cost in costs],
        "window_s": round(width, 3),
        "tokens_per_s_from_a_calm_time_before_the_first_push": [round(rate) for rate in windows],
    }


async def _pushed(fleet: Fleet, version: int, policy: Policy, calm_s: float) -> tuple[float, float]:
    """Push between two calm times, and return the times of begin and end. Raises TimeoutError: the push does not
    end."""
    await asyncio.sleep(calm_s)
    begin = time.perf_counter()
    await asyncio.wait_for(fleet.update_weights(version, policy.tensors), PATIENCE_S)
    end = time.perf_counter()
    await asyncio.sleep(calm_s)
    return begin, end


def _summary(costs: Sequence[PushCost], nbytes: int) -> dict[str, float]:
    def median(name: str) -> float:
        return float(statistics.median(getattr(cost, name) for cost in costs))

    return {
        "push_s": round(median("push_s"), 4),
        "gigabytes_per_s": round(nbytes / median("push_s") / 1e9, 4),
        "standstill_s": round(median("standstill_s"), 4),
        "lost_s": round(median("lost_s"), 3),
        "tokens_per_s_before": round(median("before")),
        "tokens_per_s_during": round(median("during")),
        "tokens_per_s_after": round(median("after")),
        "lost_share_during": round(1 - statistics.median(cost.during / cost.before for cost in costs), 3),
    }
