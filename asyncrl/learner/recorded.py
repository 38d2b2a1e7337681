"""A finished run's store in place of a replay: the learner trains the recorded plans again, without actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.errors import StoreError
from asyncrl.replay.stored import StoredRun
from asyncrl.types import BatchPlan, Labels, Trajectory

T = TypeVar("T")


class RecordedReplay:
    """The plans of the run whose replay folder is `source`, in order. There is nobody to publish to or to evaluate.

    Raises StoreError: there is no store, or it has fewer plans than `steps`.
    """

    def __init__(self, source: Path, steps: int) -> None:
        self._stored = StoredRun(source)
        if self._stored.steps() < steps:
            raise StoreError(f"{source} has {self._stored.steps()} plans; set learner.steps to at most so many")

    def close(self) -> None:
        self._stored.close()

    def plan(self, step: int) -> BatchPlan | None:
        return self._stored.plan(step)

    def labels(self, ids: Sequence[str]) -> list[Labels]:
        """The labels of `ids`. Raises StoreError: they were not kept."""
        return [self._kept(name, self._stored.labels) for name in ids]

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        """The trajectories of `ids`. Raises StoreError: one was not kept."""
        return [self._kept(name, self._stored.trajectory) for name in ids]

    def published(self, version: int) -> None:
        """Nobody waits for it."""

    def checkpointed(self, steps: int, kept: int) -> None:
        """The store stays as it is."""

    def evaluate(self, version: int) -> None:
        """There is nobody to run episodes."""

    def evaluation(self, version: int, wait: bool = True) -> Mapping[str, Any] | None:
        """There is none."""
        return None

    def _kept(self, name: str, read: Callable[[str], T | None]) -> T:
        found = read(name)
        if found is None:
            raise StoreError(
                f"{name} is gone from {self._stored.folder}; only runs with replay.retention=all can be trained again"
            )
        return found
