"""The sources of the learner's batches: the replay of the run, or the store of a finished run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from asyncrl.config.changes import ConfigChange
from asyncrl.errors import RefusedError, StoreError
from asyncrl.replay.stored import StoredRun
from asyncrl.types import NOTHING_NEEDED, BatchPlan, LabelNeeds, Labels, Task, Trajectory

T = TypeVar("T")


class BatchSource(Protocol):
    """The part of a replay that the learner uses; `asyncrl.replay.client.ReplayClient` is one. Calls wait until the
    replay answers, and raise StoppedError if this process is asked to stop meanwhile."""

    def configure(self, values: Mapping[str, Any], time: int) -> Sequence[ConfigChange]: ...

    def plan(self, step: int) -> BatchPlan | None: ...

    def labels(self, ids: Sequence[str]) -> list[Labels]: ...

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]: ...

    def plan_ahead(self, step: int) -> BatchPlan | None: ...

    # A source without actors inherits the rest: it has no images and no tasks, and no engine waits for its versions.

    def require(self, needs: Mapping[int, LabelNeeds]) -> None:
        """Have only episodes planned whose labels meet the `needs` of the algorithm: each has its first step."""
        return None

    def image(self, trajectory: str, name: bytes) -> bytes:
        raise RefusedError(f"the image {name.hex()} of {trajectory} is not there")

    def task(self, name: str) -> Task | None:
        return None

    def published(self, version: int) -> None:
        return None

    def checkpointed(self, steps: int, kept: int) -> None:
        return None

    def evaluate(self, version: int) -> None:
        return None

    def evaluation(self, version: int, wait: bool = True) -> Mapping[str, Any] | None:
        return None

    def finished(self) -> None:
        return None


class RecordedReplay(BatchSource):
    """The plans of the run whose replay folder is `source`, in order: the learner trains them again, without actors.

    Raises StoreError: there is no store, it has fewer plans than `steps`, or it was imported without its images.
    """

    def __init__(self, source: Path, steps: int) -> None:
        self._stored, self._steps = StoredRun(source), steps
        if self._stored.steps() < steps:
            raise StoreError(f"{source} has {self._stored.steps()} plans; set learner.steps to at most so many")
        if showing := self._stored.without_images():
            raise StoreError(
                f"{source} was imported, and {showing} of its trajectories show images, which exported files do not "
                "have: set replay.source to the replay folder of the run itself"
            )

    def close(self) -> None:
        self._stored.close()

    def configure(self, values: Mapping[str, Any], time: int) -> Sequence[ConfigChange]:
        """The changes that the recorded run had; nothing is recorded."""
        return self._stored.changes()

    def require(self, needs: Mapping[int, LabelNeeds]) -> None:
        """Raises StoreError: labels of a plan do not meet the needs of its step."""
        starts = sorted(needs)
        for step in range(self._steps) if set(needs.values()) != {NOTHING_NEEDED} else ():
            wanted, plan = needs[starts[bisect_right(starts, step) - 1]], self._stored.plan(step)
            for each in self.labels(plan.ids) if plan is not None and not plan.skipped else ():
                if unmet := wanted.unmet(each):
                    raise StoreError(
                        f"{self._stored.folder} cannot be trained again by this algorithm: plan {step} has "
                        f"{each.trajectory_id}, and {unmet}"
                    )

    def plan(self, step: int) -> BatchPlan | None:
        return self._stored.plan(step)

    def plan_ahead(self, step: int) -> BatchPlan | None:
        return self._stored.plan(step)

    def labels(self, ids: Sequence[str]) -> list[Labels]:
        """The labels of `ids`. Raises StoreError: they were not kept."""
        return [self._kept(name, self._stored.labels) for name in ids]

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        """The trajectories of `ids`. Raises StoreError: one was not kept."""
        return [self._kept(name, self._stored.trajectory) for name in ids]

    def image(self, trajectory: str, name: bytes) -> bytes:
        """The image of this digest that a trajectory shows. Raises RefusedError: it was not kept."""
        return self._stored.image(trajectory, name)

    def _kept(self, name: str, read: Callable[[str], T | None]) -> T:
        found = read(name)
        if found is None:
            raise StoreError(
                f"{self._stored.folder} does not have {name}; only runs with replay.retention=all can be trained again"
            )
        return found
