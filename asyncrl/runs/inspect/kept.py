"""Episodes whose text the store no longer has, from the sample that the learner kept of each step."""

from __future__ import annotations

import logging
from dataclasses import replace

from asyncrl.errors import StoreError
from asyncrl.observe.kept.episode import HELD_OUT, KeptEpisode, KeptRow
from asyncrl.replay.stored import StoredTrajectory
from asyncrl.runs.run import Run

log = logging.getLogger(__name__)


class KeptOfRun:
    """The kept episodes of the run to which a store belongs; none of a store that was imported alone. A sample that
    cannot be read is logged, and counts as none."""

    def __init__(self, run: Run) -> None:
        self._kept = run.kept() if run.owns_store else None

    def find(self, name: str) -> KeptEpisode | None:
        """The episode of that id, as the newest step that kept it trained it."""
        if self._kept is None:
            return None
        try:
            row = self._kept.find(name)
            return None if row is None else self._kept.read(row.step, name)
        except (StoreError, OSError) as error:
            log.warning("what is kept of %s cannot be read: %s", name, error)
            return None

    def groups(self, step: int) -> list[str]:
        """The groups that are kept of a step."""
        if self._kept is None:
            return []
        try:
            return list(dict.fromkeys(row.group_id for row in self._kept.rows() if _was_trained(row, step)))
        except (StoreError, OSError) as error:
            log.warning("what is kept of step %d cannot be read: %s", step, error)
            return []


def _was_trained(row: KeptRow, step: int) -> bool:
    return row.step == step and HELD_OUT not in row.flags


def filled(record: StoredTrajectory, kept: KeptEpisode | None) -> StoredTrajectory:
    """The record, with the trajectory and the labels that were kept where the store has none."""
    if kept is None or record.trajectory is not None:
        return record
    return replace(record, trajectory=kept.trajectory, labels=record.labels or kept.labels)
