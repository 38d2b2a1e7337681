"""What a run has recorded, for reading: all shards as one. A replay at work is not disturbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from asyncrl.errors import StoreError
from asyncrl.replay import report
from asyncrl.replay.records import Facts, Letter
from asyncrl.replay.shards import join_plans, shard_of
from asyncrl.replay.store import StoreReader, Transaction
from asyncrl.types import BatchPlan, Labels, Trajectory
from asyncrl.wire import decode, read_labels, read_plan, read_trajectory, split

P = ParamSpec("P")
T = TypeVar("T")


class StoredRun:
    """The stores in the replay folder of a run. Raises StoreError: there are none, or they cannot be read."""

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

    def counters(self) -> dict[str, int]:
        """Counters and depths, summed over the shards; the version is the newest."""
        return _sum([self._read(shard, report.counters) for shard in self._shards])

    def audit(self, uses: int) -> dict[str, Any]:
        """The audit of `report.audit`, over all shards."""
        parts = [self._read(shard, report.audit, uses) for shard in self._shards]
        states: Counter[str] = sum((Counter(part["states"]) for part in parts), Counter())
        largest = max(part["largest_lag"] for part in parts)
        sums = {name: sum(part[name] for part in parts) for name in ("lost", "trained_twice", "planned")}
        return {"states": dict(states), **sums, "largest_lag": largest}

    def plan(self, step: int) -> BatchPlan | None:
        """The recorded plan of a step, joined over the shards; None where it was not recorded."""
        parts = [self._read(shard, Transaction.get, "plans", step) for shard in self._shards]
        return None if None in parts else join_plans([read_plan(part) for part in parts])

    def steps(self) -> int:
        """How many plans are recorded."""
        return min(self._read(shard, Transaction.count, "plans") for shard in self._shards)

    def facts(self, trajectory: str) -> Facts | None:
        """What is known of a trajectory for good."""
        return self._read(self._shard_of(trajectory), Facts.load, trajectory)

    def letters(self) -> list[tuple[str, Letter]]:
        """Every dead letter with its ticket."""
        return [
            (key.decode(), Letter(*value)) for shard in self._shards for key, value in self._read(shard, _items, "dead")
        ]

    def ids(self) -> Iterator[str]:
        """The ids of all trajectories whose data is there, shard by shard."""
        for shard in self._shards:
            yield from self._read(shard, _keys, "data")

    def trajectory(self, name: str) -> Trajectory | None:
        """A trajectory, if its data is still there."""
        frames = self._read(self._shard_of(name), Transaction.get_bytes, "data", name)
        return None if frames is None else read_trajectory(decode(split(frames)))

    def labels(self, name: str) -> Labels | None:
        """A trajectory's labels, if they are there."""
        frames = self._read(self._shard_of(name), Transaction.get_bytes, "labels", name)
        return None if frames is None else read_labels(decode(split(frames)))

    def _shard_of(self, name: str) -> StoreReader:
        return self._shards[shard_of(name, len(self._shards))]

    def _read(
        self, shard: StoreReader, ask: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        with shard.transaction() as tx:
            return ask(tx, *args, **kwargs)


def shard_paths(folder: Path) -> list[Path]:
    """The stores in a run's replay folder, shard by shard. Raises StoreError: one is missing."""
    if (folder / "data.mdb").is_file():
        return [folder]
    numbers = sorted(int(path.name) for path in folder.glob("[0-9]*") if path.is_dir())
    if not numbers or numbers != list(range(len(numbers))):
        raise StoreError(f"{folder} holds no store, or not all shards of one: name the replay folder of a run")
    return [folder / str(number) for number in numbers]


def _items(tx: Transaction, table: str) -> list[tuple[bytes, Any]]:
    return list(tx.items(table))


def _keys(tx: Transaction, table: str) -> list[str]:
    return [key.decode() for key in tx.keys(table)]


def _sum(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    total = dict(sum((Counter(part) for part in parts), Counter()))
    names = dict.fromkeys(name for part in parts for name in part)
    return {**{name: total.get(name, 0) for name in names}, "version": max(part["version"] for part in parts)}
