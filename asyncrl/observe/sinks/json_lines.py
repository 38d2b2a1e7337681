"""Writes metrics as JSON lines, into a file for each role."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path

from asyncrl.machine.files import write_whole
from asyncrl.observe.metrics import Sink, Value

logger = logging.getLogger(__name__)

LONGEST_LINE = 16 << 20
"""The maximum number of bytes of a line. Only this many bytes at the end of a file are searched for an unfinished
line."""
_STEP = re.compile(rb'\{"step": (\d+), ')
"""The beginning of a line, as `JsonLines` writes it."""


def metrics_file(run_dir: Path, name: str) -> Path:
    """The file of a role's JSON lines."""
    return run_dir / "metrics" / f"{name}.jsonl"


class JsonLines(Sink):
    """One JSON object per line: `step`, `time` (seconds since the epoch) and the values. Appends to an existing file.

    `log` raises OSError, after removing the part of its line that was written. If the file cannot be opened, the
    next call tries again.
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

    def repeats(self, step: int) -> None:
        self.close()
        self._file = None
        remove_steps(self._path, lambda each: each == step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _open_to_append(path: Path) -> FileIO:
    """Open a file of lines, and remove a last line that a killed process left unfinished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = FileIO(path, "a+")
    size = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, size - LONGEST_LINE))
    file.truncate(start + file.read().rfind(b"\n") + 1)
    return file


def remove_steps(path: Path, removed: Callable[[int], bool]) -> None:
    """Remove the lines of the steps that will be logged again. The sink of `path` must not be in use yet. Readers see
    the old or the new file. If the disk has no room for the new file, this logs a warning, and the lines stay."""

    def stays(line: bytes) -> bool:
        step = _STEP.match(line)
        return step is None or not removed(int(step[1]))

    if all(map(stays, _whole_lines(path))):
        return
    try:
        write_whole(path, filter(stays, _whole_lines(path)))
    except OSError as error:
        logger.warning("%s still has lines of steps that will be logged again: %s", path, error)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, without a last one that a killed process left unfinished; none if there is no file."""
    if path.is_file():
        with path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))
