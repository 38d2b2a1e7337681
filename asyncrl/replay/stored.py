"""Reads the records of a run, joined over all shards, without disturbing a running replay."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from asyncrl.config.changes import ConfigChange
from asyncrl.errors import StoreError
from asyncrl.ids import shard_of
from asyncrl.replay import counters
from asyncrl.replay.client.shards import join_plans
from asyncrl.replay.store.changes import changes
from asyncrl.replay.store.images import WITHOUT_IMAGES, image_of
from asyncrl.replay.store.records import DeadLetter, TrajectoryRecord
from asyncrl.replay.store.store import StoreReader
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import BatchPlan, Labels, Trajectory
from asyncrl.wire import decode, read_labels, read_trajectory, split

P = ParamSpec("P")
T = TypeVar("T")

PAGE = 1000


@dataclass(frozen=True, slots=True, eq=False)
class StoredTrajectory:
    """Everything that is stored of one trajectory. `trajectory` and `labels` are `None` if they are not stored, for
    example after they were deleted. `dead_letter` is `None` unless the trajectory is a dead letter."""

    id: str
    facts: TrajectoryRecord | None
    trajectory: Trajectory | None
    labels: Labels | None
    dead_letter: DeadLetter | None


class StoredRun:
    """The stores in the replay folder of a run. Raises StoreError: a store is missing or cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards: list[StoreReader] = []
        with ExitStack() as stack:
            for path in shard_paths(folder):
                self._shards.append(stack.enter_context(closing(StoreReader(path))))
            stack.pop_all()

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    @property
    def shards(self) -> int:
        return len(self._shards)

    def counters(self) -> dict[str, int]:
        """Counters and sizes of tables, summed over the shards. `version` is the newest policy version that a shard
        knows."""
        return sum_counters(self.each(counters.counters))

    def without_images(self) -> int:
        """The number of trajectories of an imported run whose images are not stored."""
        return sum(self.each(Transaction.counter, WITHOUT_IMAGES))

    def audit(self, uses: int) -> dict[str, Any]:
        """The result of `counters.audit` over all shards."""
        parts = self.each(counters.audit, uses)
        states: Counter[str] = sum((Counter(part["states"]) for part in parts), Counter())
        largest = max(part["largest_lag"] for part in parts)
        sums = {name: sum(part[name] for part in parts) for name in ("lost", "trained_twice", "planned")}
        return {"states": dict(states), **sums, "largest_lag": largest}

    def plan(self, step: int) -> BatchPlan | None:
        """The recorded plan of a step, joined over the shards. `None` if a shard has not recorded it."""
        parts = self.each(Transaction.get, "plans", step, BatchPlan)
        plans = [part for part in parts if part is not None]
        return join_plans(plans) if len(plans) == len(parts) else None

    def changes(self) -> list[ConfigChange]:
        """Every recorded change of the configuration. Only the first shard records them."""
        return self._read(self._shards[0], changes)

    def steps(self) -> int:
        """The number of steps that every shard has planned."""
        return min(self.each(Transaction.count, "plans"))

    def dead_letters(self) -> list[tuple[str, DeadLetter]]:
        """Every dead letter with its ticket id."""
        return sorted(((name, dead) for part in self.each(DeadLetter.all) for name, dead in part), key=itemgetter(0))

    def ids(self, after: str = "") -> Iterator[str]:
        """The sorted ids of the trajectories whose data is stored, beginning with the first id after `after`."""
        return heapq.merge(*(self._ids(shard, after) for shard in self._shards))

    def _ids(self, shard: StoreReader, after: str) -> Iterator[str]:
        # A transaction for each page: during a long transaction a running replay could not reuse released space.
        while page := self._read(shard, Transaction.page, "data", after, PAGE):
            yield from page
            after = page[-1]

    def records(self, prefix: str = "", backwards: bool = False) -> Iterator[tuple[str, TrajectoryRecord]]:
        """The sorted trajectory ids that begin with `prefix`, with their records. With `backwards`, the last id comes
        first."""
        shards = (self._records(shard, prefix, backwards) for shard in self._shards)
        return heapq.merge(*shards, key=itemgetter(0), reverse=backwards)

    def _records(self, shard: StoreReader, prefix: str, backwards: bool) -> Iterator[tuple[str, TrajectoryRecord]]:
        after = ""
        while page := self._read(shard, TrajectoryRecord.page, prefix, after, PAGE, backwards):
            yield from page
            after = page[-1][0]

    def is_recorded(self, name: str) -> bool:
        """True if a trajectory of this id was ever stored."""
        return self._read(self._shard_of(name), TrajectoryRecord.load, name) is not None

    def facts(self, names: Sequence[str]) -> list[TrajectoryRecord]:
        """The records of trajectories. Raises StoreError: one is missing."""
        return [self._read(self._shard_of(name), TrajectoryRecord.of, name) for name in names]

    def trajectory(self, name: str) -> Trajectory | None:
        """A trajectory. `None` if its data is not stored."""
        return self._read(self._shard_of(name), _trajectory, name)

    def image(self, trajectory: str, name: bytes) -> bytes:
        """The bytes of an image of a trajectory. `name` is the image's digest. Raises RefusedError: the image is not
        stored."""
        return self._read(self._shard_of(trajectory), _image, trajectory, name)

    def labels(self, name: str) -> Labels | None:
        """A trajectory's labels. `None` if none are stored."""
        return self._read(self._shard_of(name), _labels, name)

    def record(self, name: str) -> StoredTrajectory:
        """Everything that is stored of a trajectory, from one snapshot. Raises RefusedError: `name` is not a valid
        id."""
        return self._read(self._shard_of(name), _record, name)

    def each(self, ask: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call `ask` with a snapshot of each shard, and return the results."""
        return [self._read(shard, ask, *args, **kwargs) for shard in self._shards]

    def _shard_of(self, name: str) -> StoreReader:
        return self._shards[shard_of(name, len(self._shards))]

    def _read(
        self, shard: StoreReader, ask: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        with shard.transaction() as tx:
            return ask(tx, *args, **kwargs)


def shard_paths(folder: Path) -> list[Path]:
    """The folders of the shards in a run's replay folder, in order. Raises StoreError: one is missing."""
    if (folder / "data.mdb").is_file():
        return [folder]
    numbers = sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())
    if not numbers or numbers != list(range(len(numbers))):
        raise StoreError(f"{folder} holds no store, or not all shards of one: name the replay folder of a run")
    return [folder / str(number) for number in numbers]


def _trajectory(tx: Transaction, name: str) -> Trajectory | None:
    frames = tx.get_bytes("data", name)
    return None if frames is None else read_trajectory(decode(split(bytes(frames))))


def _image(tx: Transaction, trajectory: str, name: bytes) -> bytes:
    return bytes(image_of(tx, trajectory, TrajectoryRecord.of(tx, trajectory).group, name))


def _labels(tx: Transaction, name: str) -> Labels | None:
    frames = tx.get_bytes("labels", name)
    return None if frames is None else read_labels(decode(split(bytes(frames))))


def _record(tx: Transaction, name: str) -> StoredTrajectory:
    return StoredTrajectory(
        name, TrajectoryRecord.load(tx, name), _trajectory(tx, name), _labels(tx, name), DeadLetter.load(tx, name)
    )


def sum_counters(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    """The counters of all shards, summed. `version` is the newest policy version that a shard knows."""
    total = dict(sum((Counter(part) for part in parts), Counter()))
    names = dict.fromkeys(name for part in parts for name in part)
    return {**{name: total.get(name, 0) for name in names}, "version": max(part["version"] for part in parts)}
