"""The tasks of a run: the rows of its files, or tasks that a start made, without the ones whose prompts are too long.

A start makes tasks once if `data.dataset` makes them, a source names no files, or rows do not fit into memory. It
measures prompts once. It writes both into the run's folder. Every role that needs the tasks reads them there, so that
all roles and a resumed run have the same tasks in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import DataConfig
from asyncrl.data.layout import RowLayout
from asyncrl.data.made_rows import SUFFIX, read_made
from asyncrl.data.reading import TaskFile
from asyncrl.data.sources import is_named
from asyncrl.errors import DataError


@dataclass(frozen=True, slots=True)
class Rendering:
    """The settings on which the tokens of a conversation depend: the files of the `model`, and how its chat template
    shows the tools of the `actor`. Files in the run's folder are named after them."""

    model: Sequence[object]
    actor: Sequence[object]


@dataclass(frozen=True, slots=True)
class RunTasks:
    """The tasks of a run, as its section `data` describes them. `run_dir` is the run's folder."""

    data: DataConfig
    run_dir: Path
    rendering: Rendering

    def usable(self, sources: Sequence[str]) -> TaskFile:
        """Return the tasks of `data.train` or `data.eval` (`sources`) that the run uses.

        Raises DataError: they cannot be used, none is left, or no start has measured their prompts.
        """
        tasks, data = self.all(sources), self.data
        if data.max_prompt_length is None or not data.filter_overlong:
            return tasks
        return tasks.left(read_lengths(self.lengths_file(tasks), len(tasks)) <= data.max_prompt_length)

    def all(self, sources: Sequence[str]) -> TaskFile:
        """Return the tasks of `sources`, also the ones whose prompts are too long. Training tasks have their
        demonstrations. Raises DataError: they cannot be used, or no start has made them."""
        demonstration = self.demonstration(sources)
        path = self.made_file(sources)
        if path is None:
            return TaskFile(sources, demonstration, self.layout)
        if not path.exists():
            raise DataError(f"{self._made_by(sources)}: there is no {path}; `asyncrl train` makes it")
        # A start writes tasks in verl's layout. A class makes no demonstrations.
        return TaskFile(path, demonstration, RowLayout({}, self.data.system_prompt), read_made(path))

    def demonstration(self, sources: Sequence[str]) -> str | None:
        """The column of `sources` that has demonstrations. None for evaluation tasks, which have none."""
        return self.data.demonstration if sources == self.data.train else None

    @property
    def layout(self) -> RowLayout:
        """The columns in which the files have the fields of tasks."""
        return RowLayout(self.data.columns, self.data.system_prompt)

    def made_file(self, sources: Sequence[str]) -> Path | None:
        """The file in the run's folder with the tasks that a start makes of `sources`. None: roles read the sources."""
        data = self.data
        if data.dataset is not None:
            digest = digest_of([list(sources), data.dataset, data.dataset_params])
        elif not data.keep_in_memory or any(map(is_named, sources)):
            digest = digest_of([list(sources), data.columns, self.demonstration(sources)])
        else:
            return None
        return self.run_dir / "tasks" / f"{digest}{SUFFIX}"

    def _made_by(self, sources: Sequence[str]) -> str:
        if self.data.dataset is not None:
            return f"data.dataset={self.data.dataset}"
        named = [source for source in sources if is_named(source)]
        return ", ".join(named) or f"data.keep_in_memory={str(self.data.keep_in_memory).lower()}"

    def lengths_file(self, tasks: TaskFile) -> Path:
        """The file in the run's folder with the length of each prompt, int32[rows]. Its name depends on everything on
        which the lengths depend: the files with their sizes, the system prompt, the model, and the tools."""
        made = tasks.made
        files = [(str(each.path), each.rows, 0 if made else each.path.stat().st_size) for each in tasks.files]
        if made is not None:
            files.append((made.name, len(tasks), made.stat().st_mtime_ns))
        layout = [self.data.columns, self.data.system_prompt]
        digest = digest_of([files, *self.rendering.model, *layout, *self.rendering.actor])
        return self.run_dir / "prompt_lengths" / f"{digest}.npy"


def read_lengths(path: Path, rows: int) -> NDArray[np.int32]:
    """Read the lengths int32[rows] that a start wrote. Raises DataError: it wrote none, or the file is damaged."""
    try:
        lengths: NDArray[np.int32] = np.load(path, allow_pickle=False)
        if lengths.shape != (rows,):
            raise ValueError(f"{path} has lengths {lengths.shape} of {rows} prompts")
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"data.filter_overlong=true: the lengths of prompts cannot be read: {error}; `asyncrl train` measures them"
        ) from error
    return lengths


def digest_of(values: Sequence[object]) -> str:
    """A short digest of plain values, for the name of a file that depends on them."""
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:16]
