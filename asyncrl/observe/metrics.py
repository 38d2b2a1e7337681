"""The one interface through which every role tells what it measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from asyncrl.config.schema import ObserveConfig

Value = float | list[float]


class Metrics(Protocol):
    """Takes named values at a step: numbers, or lists of numbers for histograms."""

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


def open_metrics(config: ObserveConfig, run_dir: Path, role: str) -> Metrics:
    """The sinks of one role's process: JSON lines always, the console and Weights & Biases as configured.

    Raises ConfigError: wandb is wanted and not installed.
    """
    from asyncrl.observe.sinks import Console, JsonLines, Wandb

    sinks: list[Metrics] = [JsonLines(run_dir / "metrics" / f"{role}.jsonl")]
    if config.console:
        sinks.append(Console(role))
    if config.wandb:
        sinks.append(Wandb(config.wandb_project, run_dir, role))
    return Fanout(sinks)
