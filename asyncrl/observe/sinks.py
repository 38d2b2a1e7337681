"""Sinks of metrics: JSON lines for programs, one log line for people, Weights & Biases for teams."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from asyncrl.config.schema import ObserveConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.metrics import Fanout, Metrics, Value

LONGEST_LINE = 16 << 20


class JsonLines:
    """One JSON object a line: `step`, `time` (seconds since the epoch) and the values. Appends to what is there.

    `log` raises OSError, and leaves no part of a line behind. The file is opened by the first call that can.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._file: FileIO | None = None

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        line = (json.dumps({"step": step, "time": self._clock(), **values}) + "\n").encode()
        if self._file is None:
            self._file = _open_to_append(self._path)
        size = self._file.seek(0, os.SEEK_END)
        if self._file.write(line) < len(line):
            self._file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _open_to_append(path: Path) -> FileIO:
    """A file of lines, without one that a killed process left unfinished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = FileIO(path, "a+")
    size = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, size - LONGEST_LINE))
    file.truncate(start + file.read().rfind(b"\n") + 1)
    return file


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
        self._init = partial(wandb.init, project=project, dir=str(run_dir), group=run_dir.name, name=role, mode=mode)
        self._run: Any = None

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        if self._run is None:
            self._run = self._init()
        row = {
            name: self._wandb.Histogram(value) if isinstance(value, list) else value for name, value in values.items()
        }
        self._run.log({"step": step, **row})

    def close(self) -> None:
        if self._run is not None:
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
