"""Sinks of metrics: JSON lines for programs, one log line for people, Weights & Biases for teams."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.schema import ObserveConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.metrics import Fanout, Metrics, Value


class JsonLines:
    """One JSON object a line: `step`, `time` (seconds since the epoch) and the values. Appends to what is there."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)
        self._clock = clock

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        self._file.write(json.dumps({"step": step, "time": self._clock(), **values}) + "\n")

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What a JsonLines sink wrote; a last line that is still being written is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


class Console:
    """One log line a step, with the numbers only."""

    def __init__(self, role: str) -> None:
        self._log = logging.getLogger(f"asyncrl.{role}")

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        numbers = (f"{name}={value:.4g}" for name, value in values.items() if isinstance(value, int | float))
        self._log.info("step %d: %s", step, " ".join(numbers))

    def close(self) -> None:
        pass


class Wandb:
    """Weights & Biases; offline where no key is set. Lists become histograms.

    Raises ConfigError: the package is not installed.
    """

    def __init__(self, project: str, run_dir: Path, role: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("observe.wandb=true needs the extra: pip install 'asyncrl[wandb]'") from error
        mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self._wandb = wandb
        self._run = wandb.init(project=project, dir=str(run_dir), group=run_dir.name, name=role, mode=mode)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        row = {
            name: self._wandb.Histogram(value) if isinstance(value, list) else value for name, value in values.items()
        }
        self._run.log({"step": step, **row})

    def close(self) -> None:
        self._run.finish()


def open_metrics(config: ObserveConfig, run_dir: Path, role: str) -> Metrics:
    """The sinks of one role's process: JSON lines always, the console and Weights & Biases as configured.

    Raises ConfigError: wandb is wanted and not installed.
    """
    sinks: list[Metrics] = [JsonLines(run_dir / "metrics" / f"{role}.jsonl")]
    if config.console:
        sinks.append(Console(role))
    if config.wandb:
        sinks.append(Wandb(config.wandb_project, run_dir, role))
    return Fanout(sinks)
