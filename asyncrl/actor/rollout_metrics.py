"""Logs the metrics of an actor every few seconds: counts since the actor started, means and maxima since the last
log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from asyncrl.engine.base import Engine
from asyncrl.observe.metrics import Metrics, Value
from asyncrl.types import Finish, Role, Trajectory


class RolloutMetrics:
    """Counts the outcomes of workers, and logs them to `sink` with the served version as the step.

    The counters of the engine and of `others` are logged, too. `processor_s` gives the processor seconds of the thread
    that calls it, which must be the event loop's.
    """

    def __init__(
        self,
        engine: Engine,
        others: Sequence[Callable[[], Mapping[str, float]]],
        sink: Metrics,
        interval_s: float = 5.0,
        processor_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._engine = engine
        self._others = others
        self._sink = sink
        self._interval_s = interval_s
        self._last = engine.stats()
        self._processor_s = processor_s
        self._last_processor_s = processor_s()
        self._new: list[Trajectory] = []
        self._totals = {"episodes": 0, "truncated": 0, "failed": 0, "refused": 0, "demonstrations": 0}

    def delivered(self, trajectory: Trajectory) -> None:
        """Count a trajectory that the replay has acknowledged."""
        if trajectory.is_demonstration:
            self._totals["demonstrations"] += 1
            return
        self._totals["episodes"] += 1
        self._totals["truncated"] += trajectory.finish is Finish.TRUNCATED
        self._new.append(trajectory)

    def failed(self, episodes: int = 1) -> None:
        """Count episodes that failed."""
        self._totals["failed"] += episodes

    def refused(self) -> None:
        """Count a trajectory that the replay refused."""
        self._totals["refused"] += 1

    async def run(self, running: Callable[[], int]) -> None:
        """Log every `interval_s` seconds, and once more when cancelled. `running` returns the number of running
        episodes."""
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                self.write(running())
        finally:
            self.write(running())

    def write(self, running: int) -> None:
        """Log once. `idle` is the share of the time since the last log in which the engine had no request, `loop_busy`
        the share in which the event loop used its core."""
        now, last, new = self._engine.stats(), self._last, self._new
        self._last, self._new = now, []
        computed = self._processor_s() - self._last_processor_s
        self._last_processor_s += computed
        seconds = now.seconds - last.seconds
        values: dict[str, Value] = {
            **self._totals,
            "running": running,
            "version": self._engine.version,
            "tokens": now.tokens,
            "seconds": now.seconds,
            "idle_seconds": now.idle_seconds,
            **now.counters,
        }
        for counters in self._others:
            values.update(counters())
        if seconds > 0:
            values["tokens_per_s"] = (now.tokens - last.tokens) / seconds
            values["idle"] = (now.idle_seconds - last.idle_seconds) / seconds
            values["loop_busy"] = computed / seconds
        if new:
            turns = [sum(turn.role is Role.ASSISTANT for turn in trajectory.turns) for trajectory in new]
            for name, counts in (("episode_tokens", [len(trajectory) for trajectory in new]), ("turns", turns)):
                values |= {f"{name}_mean": sum(counts) / len(counts), f"{name}_max": max(counts)}
            for phase in sorted({phase for trajectory in new for phase in trajectory.timings}):
                values[f"{phase}_s"] = sum(trajectory.timings.get(phase, 0.0) for trajectory in new) / len(new)
        self._sink.log(max(0, self._engine.version), values)
