"""Reads the kept episodes of a run, finished or running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from pathlib import Path

from asyncrl.errors import RefusedError
from asyncrl.ids import is_evaluation
from asyncrl.observe.kept.episode import KeptEpisode, KeptRow
from asyncrl.observe.kept.format import EVALUATED_FOLDER, FOLDER, StepFile, file_name
from asyncrl.observe.kept.index import IndexReader


class KeptEpisodes:
    """The kept episodes of the run in `run_dir`. Several threads may use this object."""

    def __init__(self, run_dir: Path) -> None:
        self._folders = (run_dir / FOLDER, run_dir / EVALUATED_FOLDER)
        self._indices = [IndexReader(folder) for folder in self._folders]
        self._lock = threading.Lock()
        self._rows: Sequence[KeptRow] = ()

    def rows(self) -> Sequence[KeptRow]:
        """The rows of all kept episodes by step. Within a step they are in the order of its plan, and held-out episodes
        come last. Calling this again is cheap: it reads only new lines, and returns the same object if there are no new
        lines.

        Raises StoreError: the index is damaged, or another version of asyncrl wrote it; OSError: it cannot be read.
        """
        with self._lock:
            if sum(index.refresh() for index in self._indices):
                lines = [line for index in self._indices for line in index.steps.values()]
                # The sort is stable, so held-out episodes come last.
                self._rows = tuple(row for line in sorted(lines, key=attrgetter("step")) for row in line.rows)
            return self._rows

    def read(self, step: int, name: str) -> KeptEpisode:
        """The kept episode `name` of a step. Raises RefusedError: the episode was not kept, or was deleted; StoreError:
        its file is damaged."""
        found = self._read(step, name, lambda row: row.id == name)
        if not found:
            raise self._not_kept(f"{name} of step {step}")
        return found[0]

    def group(self, step: int, group_id: str) -> list[KeptEpisode]:
        """All members of a kept group of a step, in their order. Raises as `read` does."""
        found = self._read(step, group_id, lambda row: row.group_id == group_id)
        if not found:
            raise self._not_kept(f"group {group_id} of step {step}")
        return sorted(found, key=lambda each: each.row.member)

    def several(self, step: int, names: Collection[str]) -> list[KeptEpisode]:
        """The kept episodes of a step with these ids, except those that were deleted. Raises StoreError: a file is
        damaged."""
        wanted = set(names)
        # For trained and for held-out episodes, one name each is enough to choose the file.
        kinds = {is_evaluation(name): name for name in wanted}
        return [each for name in kinds.values() for each in self._read(step, name, lambda row: row.id in wanted)]

    def find(self, name: str) -> KeptRow | None:
        """The row of the episode `name`, from the newest step that kept it; `None` if it is not kept. Raises as `rows`
        does."""
        return next((row for row in reversed(self.rows()) if row.id == name), None)

    def step(self, step: int) -> list[KeptEpisode]:
        """All kept episodes that a step trained. Raises StoreError: its file is damaged."""
        return self._read(step, "", lambda row: True)

    def _read(self, step: int, name: str, wanted: Callable[[KeptRow], bool]) -> list[KeptEpisode]:
        """Read the wanted episodes in the file of a step. `name`, an episode or a group, decides between the files of
        trained and of held-out episodes."""
        path = self._folders[is_evaluation(name)] / file_name(step)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return []
        file = StepFile(content, path)
        return [file.episode(index) for index, row in enumerate(file.rows) if wanted(row)]

    def _not_kept(self, what: str) -> RefusedError:
        return RefusedError(
            f"{what} is not kept: observe.keep_episodes sets how many groups of a step are kept, "
            "observe.keep_evaluated how many episodes of an evaluation, and observe.keep_episodes_mb their total size"
        )
