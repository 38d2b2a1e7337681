"""Heavy-tailed delays for any tool, to measure the cost of slow tools. The tool `slow_calculator` has such delays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from asyncrl.tools.base import Tool
from asyncrl.tools.calculator import Calculator


class Delayed(Tool):
    """A mixin that delays the calls of a tool. The episode's id seeds the delays, so that runs can be repeated."""

    async def create(
        self, scale_s: float | None = None, alpha: float | None = None, max_s: float | None = None, **kwargs: Any
    ) -> None:
        """Set the delay of each call: scale_s * Pareto(alpha) seconds, at most max_s.

        The default is 0.1 * Pareto(1.5), at most 5. `actor.tool_timeout_s` must exceed `max_s`.
        """
        self._scale_s = 0.1 if scale_s is None else scale_s
        self._alpha = 1.5 if alpha is None else alpha
        self._max_s = 5.0 if max_s is None else max_s
        self._random = random.Random(self.episode)
        await super().create(**kwargs)

    def next_delay_s(self) -> float:
        """Draw the delay of one call."""
        return min(self._max_s, self._scale_s * self._random.paretovariate(self._alpha))

    async def execute(self, arguments: Mapping[str, Any]) -> Any:
        await asyncio.sleep(self.next_delay_s())
        return await super().execute(arguments)  # type: ignore[safe-super]


class SlowCalculator(Delayed, Calculator):
    """A calculator with delays. Its name for the policy is `calculator`, too."""
