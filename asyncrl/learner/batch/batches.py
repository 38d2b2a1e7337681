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
    """The learner's interface to a replay, implemented by `RecordedReplay` and by the client's `ShardedReplay`. Calls
    wait until the replay answers, and raise StoppedError if this process is asked to stop meanwhile."""

    def configure(self, values: Mapping[str, Any], time: int) -> Sequence[ConfigChange]: ...

    def plan(self, step: int) -> BatchPlan | None: ...

    def labels(self, ids: Sequence[str]) -> list[Labels]: ...

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]: ...

    def plan_ahead(self, step: int) -> BatchPlan | None: ...

    # Defaults for a source that has no images, tasks or engines.

    def require(self, needs: Mapping[int, LabelNeeds]) -> None:
        """Tell the replay to plan only episodes whose labels meet the algorithm's needs. The keys of `needs` are steps:
        the needs at a key hold from that step to the next key."""
        return None

    def image(self, trajectory: str, name: bytes) -> bytes:
        raise RefusedError(f"the image {name.hex()} of {trajectory} does not exist")

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
    """The plans of a finished run, which the learner trains again in order and without actors. Raises StoreError: the
    replay folder `source` has no store, its store has fewer plans than `steps`, or the recorded run was imported
    without its images.
    """

    def __init__(self, source: Path, steps: int) -> None:
        self._stored, self._steps = StoredRun(source), steps
        if self._stored.steps() < steps:
            raise StoreError(
                f"{source} has {(found := self._stored.steps())} plans; set learner.steps to at most {found}"
            )
        if showing := self._stored.without_images():
            raise StoreError(
                f"{source} was imported, and {showing} of its trajectories show images, which exported files do not "
                "have: set replay.source to the replay folder of the run itself"
            )

    def close(self) -> None:
        self._stored.close()

    def configure(self, values: Mapping[str, Any], time: int) -> Sequence[ConfigChange]:
        """Return the configuration changes of the recorded run. `values` and `time` are ignored."""
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
        """Return the labels of `ids`. Raises StoreError: they were not kept."""
        return [self._kept(name, self._stored.labels) for name in ids]

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        """Return the trajectories of `ids`. Raises StoreError: a trajectory was not kept."""
        return [self._kept(name, self._stored.trajectory) for name in ids]

    def image(self, trajectory: str, name: bytes) -> bytes:
        """Return the image with the digest `name` that a trajectory shows. Raises RefusedError: it was not kept."""
        return self._stored.image(trajectory, name)

    def _kept(self, name: str, read: Callable[[str], T | None]) -> T:
        found = read(name)
        if found is None:
            raise StoreError(
                f"{self._stored.folder} does not have {name}; only runs with replay.retention=all can be trained again"
            )
        return found
