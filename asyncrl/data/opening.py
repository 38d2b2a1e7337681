"""Opens the tasks of a run: rows of files, or tasks that the run made when it first started. Tasks whose prompts are
too long can be left out.

When a run first starts, its launcher makes the tasks if `data.dataset` is set, a source is not a file, or
`data.keep_in_memory` is false. The launcher also measures the prompts. It writes tasks and lengths into the run's
folder, where every role reads them. So all roles and a resumed run have the same tasks in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """The settings in the sections `model` and `actor` that determine the tokens of a conversation.

    If a file in the run's folder depends on these settings, its name contains a hash of them.
    """

    model: Sequence[object]
    actor: Sequence[object]


@dataclass(frozen=True, slots=True)
class RunTasks:
    """The tasks of a run, given its section `data` and its folder. With `whole_rows`, tasks keep all columns."""

    data: DataConfig
    run_dir: Path
    rendering: Rendering
    whole_rows: bool = False

    def usable(self, sources: Sequence[str], held_out: bool = False) -> TaskFile:
        """The tasks of `sources` (`data.train`, or `data.eval` with `held_out`), except those that
        `data.filter_overlong` leaves out.

        Raises DataError: the tasks cannot be used, none is left, or their prompts were not measured.
        """
        tasks, data = self.all(sources, held_out), self.data
        if data.max_prompt_length is None or not data.filter_overlong:
            return tasks
        return tasks.left(read_lengths(self.lengths_file(tasks), len(tasks)) <= data.max_prompt_length)

    def all(self, sources: Sequence[str], held_out: bool = False) -> TaskFile:
        """The tasks of `sources`, even those with too long prompts. There are at most `data.limit`, or with `held_out`
        at most `data.eval_limit`. Training tasks have their demonstrations.

        Raises DataError: the tasks cannot be used, or were not made yet.
        """
        tasks, limit = self._every(sources), self.data.eval_limit if held_out else self.data.limit
        return tasks if limit is None or limit >= len(tasks) else tasks.spread(limit)

    def _every(self, sources: Sequence[str]) -> TaskFile:
        demonstration = self.demonstration(sources)
        path = self.made_file(sources)
        if path is None:
            return TaskFile(sources, demonstration, self.layout)
        if not path.exists():
            raise DataError(f"{self._made_by(sources)}: {path} does not exist; `asyncrl train` makes it")
        # Made files are already in verl's layout.
        return TaskFile(path, demonstration, replace(self.layout, columns={}), read_made(path))

    def demonstration(self, sources: Sequence[str]) -> str | None:
        """The column of `sources` with demonstrations; None for evaluation tasks, which have no demonstrations."""
        return self.data.demonstration if sources == self.data.train else None

    @property
    def layout(self) -> RowLayout:
        """The mapping from columns of the files to fields of tasks."""
        return RowLayout(self.data.columns, self.data.system_prompt, self.whole_rows)

    def made_file(self, sources: Sequence[str]) -> Path | None:
        """The file in the run's folder with the tasks made from `sources`. None if the roles read the sources
        themselves."""
        data = self.data
        made: list[object]
        if data.dataset is not None:
            made = [list(sources), data.dataset, data.dataset_params]
        elif not data.keep_in_memory or any(map(is_named, sources)):
            made = [list(sources), data.columns, self.demonstration(sources)]
        else:
            return None
        digest = digest_of([*made, *(["whole rows"] if self.whole_rows else [])])
        return self.run_dir / "tasks" / f"{digest}{SUFFIX}"

    def _made_by(self, sources: Sequence[str]) -> str:
        if self.data.dataset is not None:
            return f"data.dataset={self.data.dataset}"
        named = [source for source in sources if is_named(source)]
        return ", ".join(named) or f"data.keep_in_memory={str(self.data.keep_in_memory).lower()}"

    def lengths_file(self, tasks: TaskFile) -> Path:
        """The file in the run's folder with the length of each prompt, int32[rows].

        Its name contains a hash of everything that determines the lengths: the files with their sizes, the columns, the
        system prompt, the model and the tools.
        """
        made = tasks.made
        files = [(str(each.path), each.rows, 0 if made else each.path.stat().st_size) for each in tasks.files]
        if made is not None:
            files.append((made.name, len(tasks), made.stat().st_mtime_ns))
        elif len(tasks) < sum(each.rows for each in tasks.files):
            files.append(("limit", len(tasks), 0))
        layout = [self.data.columns, self.data.system_prompt]
        digest = digest_of([files, *self.rendering.model, *layout, *self.rendering.actor])
        return self.run_dir / "prompt_lengths" / f"{digest}.npy"


def read_lengths(path: Path, rows: int) -> NDArray[np.int32]:
    """The lengths int32[rows] of prompts, from a file. Raises DataError: the file does not exist, or is damaged."""
    try:
        lengths: NDArray[np.int32] = np.load(path, allow_pickle=False)
        if lengths.shape != (rows,):
            raise ValueError(f"{path} has lengths of shape {lengths.shape} for {rows} prompts")
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"data.filter_overlong=true: the lengths of prompts cannot be read: {error}; `asyncrl train` measures them"
        ) from error
    return lengths


def digest_of(values: Sequence[object]) -> str:
    """A short hash of plain values, for the name of a file that depends on them."""
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:16]
