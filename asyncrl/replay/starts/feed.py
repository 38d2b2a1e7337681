"""The feed chooses the next task. Its whole state is in the store, so that a restart continues at the same task.

The feed goes through all rows in epochs, each shuffled by the run's seed. With weights, each data source has its own
epochs, and a random draw chooses the source of the next task. With several shards, the feed of shard i has the rows
whose number modulo the number of shards is i, so that one shard knows all attempts at a task. A difficulty band skips
tasks whose running success rate is too high or too low, and tries them again every `revisit` epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.errors import DataError
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import Task

ALL = "*"
RATE_DECAY = 0.5


@dataclass(frozen=True, slots=True)
class Band:
    """Tasks with a success rate in [low, high] are drawn. Other tasks are tried again after `revisit` epochs."""

    low: float
    high: float
    revisit: int


class Feed:
    """An endless sequence of rows of `tasks`. `weights` maps data sources to their weights. Without weights all rows
    come equally often.

    The same seed gives the same order, also after a restart. Raises DataError: there are no tasks, or a source with a
    weight has no tasks."""

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        shuffle: bool,
        weights: Mapping[str, float] | None = None,
        band: Band | None = None,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        self.tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._band = band
        self._shard = shard
        self._shards = shards
        self._rows = _rows_by_source(tasks, weights, range(shard, len(tasks), shards))
        chances = np.array([weights[source] if weights else 1.0 for source in self._rows])
        self._chances = chances / chances.sum()
        self._orders: dict[str, tuple[int, Sequence[int]]] = {}

    def next(self, tx: Transaction) -> tuple[int, int]:
        """The number of the next draw, which is unique over all shards, and the row of the drawn task."""
        draw = tx.add("feed_draws") - 1
        source = self._source(draw)
        row = self._row(tx, source)
        for _ in range(len(self._rows[source])):
            if self._wanted(tx, row, self._epoch(tx, source)):
                break
            tx.add("tasks_passed_over")
            row = self._row(tx, source)
        return draw * self._shards + self._shard, row

    def learned(self, tx: Transaction, row: int, success: float) -> None:
        """Record `success`, the mean outcome of a complete group of the task in `row`."""
        entry = tx.get("tasks", row, tuple[float, int])
        rate = success if entry is None else entry[0] + RATE_DECAY * (success - entry[0])
        source = ALL if ALL in self._rows else self.tasks[row].data_source
        tx.put("tasks", row, [rate, self._epoch(tx, source)])

    def _source(self, draw: int) -> str:
        names = list(self._rows)
        if len(names) == 1:
            return names[0]
        return names[int(np.random.default_rng([self._seed, self._shard, draw]).choice(len(names), p=self._chances))]

    def _row(self, tx: Transaction, source: str) -> int:
        rows = self._rows[source]
        epoch, offset = divmod(tx.add(f"feed/{source}") - 1, len(rows))
        if not self._shuffle:
            return rows[offset]
        if self._orders.get(source, (-1, ()))[0] != epoch:
            order = np.random.default_rng([self._seed, epoch, len(rows)]).permutation(len(rows))
            self._orders[source] = (epoch, [rows[index] for index in order])
        return self._orders[source][1][offset]

    def _wanted(self, tx: Transaction, row: int, epoch: int) -> bool:
        entry = None if self._band is None else tx.get("tasks", row, tuple[float, int])
        if entry is None or self._band is None:
            return True
        rate, seen = entry
        return self._band.low <= rate <= self._band.high or epoch - seen >= self._band.revisit

    def _epoch(self, tx: Transaction, source: str) -> int:
        """The epoch of the row that was drawn last from `source`."""
        return (tx.counter(f"feed/{source}") - 1) // len(self._rows[source])


def _rows_by_source(
    tasks: Sequence[Task], weights: Mapping[str, float] | None, numbers: Sequence[int]
) -> dict[str, list[int]]:
    if not len(numbers):
        raise DataError(f"data.train has {len(tasks)} rows, too few: every shard needs at least one task")
    if not weights:
        return {ALL: list(numbers)}
    rows: dict[str, list[int]] = {source: [] for source in sorted(weights)}
    for number in numbers:
        source = tasks[number].data_source
        if source in rows:
            rows[source].append(number)
    empty = [source for source, found in rows.items() if not found]
    if empty:
        raise DataError(f"data.weights names {', '.join(empty)}, of which data.train has too few tasks")
    return rows
