"""Writes the kept episodes of a run, within a bound on their bytes. One process writes, others may read meanwhile.

A step's file gets its name once it is complete. Only then its line is added to the index. If the process is killed in
between, it leaves a file without a line, which the next writer removes. When a step is deleted, its line is removed
before its file.
"""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from asyncrl.errors import StoreError
from asyncrl.machine.files import partial_name
from asyncrl.observe.kept.episode import KeptStep
from asyncrl.observe.kept.format import FOLDER, PATTERN, StepFile, encode_step, file_name
from asyncrl.observe.kept.index import IndexLine, IndexReader, encode_index, encode_line
from asyncrl.observe.kept.thinning import expendable

logger = logging.getLogger(__name__)

LARGEST_STEP = 0.5
"""The largest share of `max_bytes` that one step may take."""
DEAD_SHARE = 1 / 32
"""The index is written again when its outdated lines take more than this share of `max_bytes`."""


class KeptWriter:
    """Adds episodes to those kept in `folder` of `run_dir`. All together take at most `max_bytes`. Opening the writer
    removes unfinished files, and files of steps that are not in the index. `thinned` counts the steps that this writer
    has deleted to make room.

    If the index is missing or damaged, or if another version of asyncrl wrote it, it is made again from the files that
    can be read. Raises OSError: the folder cannot be read or written.
    """

    def __init__(self, run_dir: Path, max_bytes: int, folder: str = FOLDER) -> None:
        self._folder = run_dir / folder
        self._max_bytes = max_bytes
        self.thinned = 0
        self._folder.mkdir(parents=True, exist_ok=True)
        self._index = _opened(self._folder)
        known = set(map(file_name, self._index.steps))
        for pattern in (PATTERN, partial_name(Path(PATTERN)).name):
            for path in self._folder.glob(pattern):
                if path.name not in known:
                    path.unlink()

    @property
    def bytes(self) -> int:
        """Bytes of the files of all steps, and of the index."""
        return sum(line.bytes for line in self._index.steps.values()) + self._index.size

    def add(self, kept: KeptStep) -> None:
        """Keep a step's sample, replacing an earlier one of the same step.

        Raises StoreError: the sample takes more than `LARGEST_STEP` of `max_bytes`; OSError: the sample could not be
        written; WireError: it cannot be encoded.
        """
        content = encode_step(kept)
        if kept.step in self._index.steps:
            self._delete(kept.step)
        if len(content) > LARGEST_STEP * self._max_bytes:
            raise StoreError(
                f"the sample of step {kept.step} has {len(content)} bytes, too many for observe.keep_episodes_mb"
            )
        line = IndexLine(kept.step, len(content), [each.row for each in kept.episodes])
        room = self._max_bytes - len(content) - len(encode_line(line))
        while self._index.steps and self.bytes > room:
            self._give_up()
        path = self._folder / file_name(kept.step)
        partial = partial_name(path)
        try:
            partial.write_bytes(content)
            partial.replace(path)
            self._append(line)
        except OSError:
            for each in (partial, path):
                with suppress(OSError):
                    each.unlink(missing_ok=True)
            raise

    def _give_up(self) -> None:
        steps = sorted(self._index.steps)
        self._delete(steps[expendable(steps, [self._index.steps[each].bytes for each in steps])])
        self.thinned += 1

    def _delete(self, step: int) -> None:
        self._append(IndexLine(step, 0, ()))
        (self._folder / file_name(step)).unlink(missing_ok=True)
        if self._index.dead_bytes > DEAD_SHARE * self._max_bytes:
            _rewrite(self._index)

    def _append(self, line: IndexLine) -> None:
        """Add a line, or leave the index as it is. Raises OSError."""
        encoded = encode_line(line)
        with self._index.path.open("r+b", buffering=0) as file:
            # A process that was killed may have left a part of a line.
            file.truncate(self._index.size)
            file.seek(self._index.size)
            if file.write(encoded) < len(encoded):
                file.truncate(self._index.size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._index.path))
        self._index.refresh()


def _opened(folder: Path) -> IndexReader:
    """Write the index of a folder again, and open it."""
    index = _read(folder)
    _rewrite(index)
    return index


def _read(folder: Path) -> IndexReader:
    """Read the index of a folder. If it is missing or damaged, make it from the files of the steps. Raises OSError."""
    index = IndexReader(folder)
    try:
        if index.refresh():
            return index
        reason = f"{index.path} has no line"
    except StoreError as error:
        reason = str(error)
    found = sorted(folder.glob(PATTERN))
    if found:
        logger.warning("the index of the kept episodes is made again from their files: %s", reason)
        index.steps = {line.step: line for line in map(_line, found) if line is not None}
    return index


def _line(path: Path) -> IndexLine | None:
    content = path.read_bytes()
    try:
        rows = StepFile(content, path).rows
    except StoreError as error:
        logger.warning("%s", error)
        return None
    return IndexLine(rows[0].step, len(content), rows) if rows else None


def _rewrite(index: IndexReader, counts: Callable[[int], bool] = lambda step: True) -> None:
    """Write the index again, with the lines of the steps for which `counts` is true. Raises OSError."""
    partial = partial_name(index.path)
    lines = [index.steps[step] for step in sorted(index.steps) if counts(step)]
    partial.write_bytes(encode_index(uuid.uuid4().hex, lines))
    partial.replace(index.path)
    index.refresh()


def remove_kept(run_dir: Path, is_repeated: Callable[[int], bool], folder: str = FOLDER) -> None:
    """Remove the kept episodes of steps that will be trained or evaluated again (`is_repeated`). If the disk has no
    room for the new index, this logs a warning, and the episodes stay until the steps are repeated."""
    try:
        index = _read(run_dir / folder)
        repeated = list(filter(is_repeated, index.steps))
        if repeated:
            _rewrite(index, lambda step: not is_repeated(step))
        for step in repeated:
            (run_dir / folder / file_name(step)).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s still has episodes of steps that will be repeated: %s", run_dir / folder, error)
