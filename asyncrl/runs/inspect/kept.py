"""Reads episodes whose text the store no longer has: they come from the sample that the learner kept of each step."""

from __future__ import annotations

import logging
from dataclasses import replace

from asyncrl.errors import StoreError
from asyncrl.observe.kept.episode import HELD_OUT, KeptEpisode, KeptRow
from asyncrl.replay.stored import StoredTrajectory
from asyncrl.runs.run import Run

log = logging.getLogger(__name__)


class KeptOfRun:
    """The kept episodes of a store's run; none for an imported store, which has no run. Episodes that cannot be read
    are logged and left out."""

    def __init__(self, run: Run) -> None:
        self._kept = run.kept() if run.owns_store else None

    def find(self, name: str) -> KeptEpisode | None:
        """The episode `name`, with its values in the newest step that kept it; `None` if it is not kept."""
        if self._kept is None:
            return None
        try:
            row = self._kept.find(name)
            return None if row is None else self._kept.read(row.step, name)
        except (StoreError, OSError) as error:
            log.warning("the kept episode %s cannot be read: %s", name, error)
            return None

    def groups(self, step: int) -> list[str]:
        """The kept groups of a step."""
        if self._kept is None:
            return []
        try:
            return list(dict.fromkeys(row.group_id for row in self._kept.rows() if _was_trained(row, step)))
        except (StoreError, OSError) as error:
            log.warning("the kept episodes of step %d cannot be read: %s", step, error)
            return []


def _was_trained(row: KeptRow, step: int) -> bool:
    return row.step == step and HELD_OUT not in row.flags


def filled(record: StoredTrajectory, kept: KeptEpisode | None) -> StoredTrajectory:
    """Complete the record. If the store has no trajectory, take the kept one, and the kept labels if there are no
    others."""
    if kept is None or record.trajectory is not None:
        return record
    return replace(record, trajectory=kept.trajectory, labels=record.labels or kept.labels)
