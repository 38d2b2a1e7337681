"""Metrics as JSON lines: the file of each role, which every program reads."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path

import msgspec

from asyncrl.machine.files import write_whole
from asyncrl.observe.lines import LONGEST_LINE, decoded, each_line
from asyncrl.observe.metrics import Sink, Value

logger = logging.getLogger(__name__)


def metrics_file(run_dir: Path, name: str) -> Path:
    """The file of a role's JSON lines."""
    return run_dir / "metrics" / f"{name}.jsonl"


class JsonLines(Sink):
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


class _Step(msgspec.Struct):
    step: int


_STEP = msgspec.json.Decoder(_Step)


def remove_steps(path: Path, removed: Callable[[int], bool]) -> None:
    """Remove the lines of the steps that will be logged again, before the sink of `path` is used. Readers of the file
    see the old one or the new one. A disk without room for it keeps the lines, with a warning."""

    def stays(line: bytes) -> bool:
        row = decoded(_STEP, line)
        return row is None or not removed(row.step)

    if all(map(stays, each_line(path))):
        return
    try:
        write_whole(path, (line + b"\n" for line in each_line(path) if stays(line)))
    except OSError as error:
        logger.warning("%s keeps lines of steps that are trained again: %s", path, error)
