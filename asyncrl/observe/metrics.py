"""The interface through which every role reports its metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

logger = logging.getLogger(__name__)

Value = float | str


class Metrics(Protocol):
    """Takes named values at a step: numbers, or text for people. docs/metrics.md has every name."""

    def log(self, step: int, values: Mapping[str, Value]) -> None: ...

    def close(self) -> None: ...


class Fanout:
    """Passes everything on to several sinks. A sink that fails never ends the process: its values are lost, counted as
    `metrics/lost` in the values that follow, and logged the first time."""

    def __init__(self, sinks: Sequence[Metrics]) -> None:
        self._sinks = sinks
        self._failed: set[int] = set()
        self.lost = 0

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        if self.lost:
            values = {**values, "metrics/lost": float(self.lost)}
        for index, sink in enumerate(self._sinks):
            self._try(index, partial(sink.log, step, values))

    def close(self) -> None:
        for index, sink in enumerate(self._sinks):
            self._try(index, sink.close)

    def _try(self, index: int, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a sink is a library's or a service's, which raises what it likes
            self.lost += 1
            if index not in self._failed:
                self._failed.add(index)
                name = type(self._sinks[index]).__name__
                logger.warning("metrics are lost: %s failed with %r; metrics/lost counts on", name, error)
