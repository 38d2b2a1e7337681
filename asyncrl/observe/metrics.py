"""The one interface through which every role tells what it measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Value = float | list[float] | str


class Metrics(Protocol):
    """Takes named values at a step: numbers, lists of numbers for histograms, or text for people."""

    def log(self, step: int, values: Mapping[str, Value]) -> None: ...

    def close(self) -> None: ...


class Fanout:
    """Passes everything on to several sinks."""

    def __init__(self, sinks: Sequence[Metrics]) -> None:
        self._sinks = sinks

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        for sink in self._sinks:
            sink.log(step, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
