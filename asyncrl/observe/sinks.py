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
from typing import Any, Literal

from asyncrl.config.schema import ObserveConfig
from asyncrl.errors import ConfigError
from asyncrl.machine.files import write_whole
from asyncrl.observe.metrics import Fanout, Metrics, Value

logger = logging.getLogger(__name__)

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


def remove_steps(path: Path, removed: Callable[[int], bool]) -> None:
    """Remove the lines of the steps that will be logged again, before the sink of `path` is used. Readers of the file
    see the old one or the new one. A disk without room for it keeps the lines, with a warning."""
    lines = read_lines(path)
    kept = [line for line in lines if not removed(line["step"])]
    if len(kept) < len(lines):
        try:
            write_whole(path, "".join(f"{json.dumps(line)}\n" for line in kept))
        except OSError as error:
            logger.warning("%s keeps lines of steps that are trained again: %s", path, error)


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
    """Weights & Biases; offline where no key is set.

    Raises ConfigError: the package is not installed.
    """

    def __init__(self, project: str, run_dir: Path, role: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("observe.wandb=true needs the extra: pip install 'asyncrl[wandb]'") from error
        mode: Literal["online", "offline"] = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self._init = partial(wandb.init, project=project, dir=str(run_dir), group=run_dir.name, name=role, mode=mode)
        self._run: Any = None

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        if self._run is None:
            self._run = self._init()
        self._run.log({"step": step, **values})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def metrics_file(run_dir: Path, name: str) -> Path:
    """The file of a role's JSON lines."""
    return run_dir / "metrics" / f"{name}.jsonl"


def open_metrics(config: ObserveConfig, run_dir: Path, role: str) -> Metrics:
    """The sinks of one role's process: JSON lines always, the console and Weights & Biases as configured.

    Raises ConfigError: wandb is wanted and not installed.
    """
    return Fanout([JsonLines(metrics_file(run_dir, role)), *_services(config, run_dir, role)])


def open_learner_metrics(config: ObserveConfig, run_dir: Path) -> tuple[Metrics, Metrics]:
    """Sinks of the learner's steps and of its evaluations: each has a file with one line a step, and both share the
    console and Weights & Biases. Raises ConfigError as `open_metrics` does."""
    services = _services(config, run_dir, "learner")
    steps, evaluations = (JsonLines(metrics_file(run_dir, name)) for name in ("learner", "evaluation"))
    return Fanout([steps, *services]), Fanout([evaluations, *services])


def _services(config: ObserveConfig, run_dir: Path, role: str) -> list[Metrics]:
    sinks: list[Metrics] = []
    if config.console:
        sinks.append(Console(role))
    if config.wandb:
        sinks.append(Wandb(config.wandb_project, run_dir, role))
    return sinks
