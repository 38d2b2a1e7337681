"""What an actor measures, told every few seconds: counters from the start, lists and means since the last report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict

from asyncrl.actor.chat_api.counts import DoorCounts
from asyncrl.actor.engine.base import Engine
from asyncrl.actor.toolbox import ToolCounts
from asyncrl.observe.metrics import Metrics, Value
from asyncrl.types import Finish, Role, Trajectory

INTERVAL_S = 5.0


class Report:
    """Counts what a worker delivers and logs it, with the engine's, the tools' and `others`' counters, at the served
    version."""

    def __init__(
        self,
        engine: Engine,
        tools: ToolCounts,
        metrics: Metrics,
        interval_s: float = INTERVAL_S,
        door: DoorCounts | None = None,
        others: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._engine = engine
        self._tools = tools
        self._door = door
        self._metrics = metrics
        self._others = others
        self._interval_s = interval_s
        self._last = engine.stats()
        self._new: list[Trajectory] = []
        self._totals = {"episodes": 0, "truncated": 0, "failed": 0, "refused": 0}

    def delivered(self, trajectory: Trajectory) -> None:
        self._totals["episodes"] += 1
        self._totals["truncated"] += trajectory.finish is Finish.TRUNCATED
        self._new.append(trajectory)

    def failed(self) -> None:
        self._totals["failed"] += 1

    def refused(self) -> None:
        self._totals["refused"] += 1

    async def run(self, running: Callable[[], int]) -> None:
        """Write now and then, and a last time when cancelled. `running` tells how many episodes are at work."""
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                self.write(running())
        finally:
            self.write(running())

    def write(self, running: int) -> None:
        """Log what there is. `idle` is the share of time since the last report in which the engine had no request."""
        now, last, new = self._engine.stats(), self._last, self._new
        self._last, self._new = now, []
        seconds = now.seconds - last.seconds
        values: dict[str, Value] = {
            **self._totals,
            **{f"tool_{name}": count for name, count in asdict(self._tools).items()},
            **self._others(),
            "running": running,
            "version": self._engine.version,
            "tokens": now.tokens,
            "seconds": now.seconds,
            "idle_seconds": now.idle_seconds,
            **now.counters,
        }
        if self._door is not None:
            values.update({f"door_{name}": count for name, count in asdict(self._door).items()})
        if seconds > 0:
            values["tokens_per_s"] = (now.tokens - last.tokens) / seconds
            values["idle"] = (now.idle_seconds - last.idle_seconds) / seconds
        if new:
            values["episode_tokens"] = [float(len(trajectory)) for trajectory in new]
            values["turns"] = [float(_turns(trajectory)) for trajectory in new]
            for phase in sorted({phase for trajectory in new for phase in trajectory.timings}):
                values[f"{phase}_s"] = sum(trajectory.timings.get(phase, 0.0) for trajectory in new) / len(new)
        self._metrics.log(max(0, self._engine.version), values)


def _turns(trajectory: Trajectory) -> int:
    return sum(turn.role is Role.ASSISTANT for turn in trajectory.turns)
