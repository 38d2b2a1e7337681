"""A run's store to Parquet, in memory that does not grow with the run. A replay at work is not disturbed."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.inspect.aside import written_aside
from asyncrl.inspect.columns import (
    FORMAT,
    LETTERS,
    LETTERS_FILE,
    PLANS,
    PLANS_FILE,
    TRAJECTORIES,
    TRAJECTORIES_FILE,
    letter_row,
    plan_row,
    trajectory_batch,
)
from asyncrl.replay.counters import COUNTERS
from asyncrl.replay.store import Transaction
from asyncrl.replay.stored import StoredRun, StoredTrajectory

METADATA = b"asyncrl"
GROUP_TOKENS = 1 << 20
GROUP_ROWS = 4096
PLANS_A_GROUP = 64


def export_run(
    stored: StoredRun, folder: Path, states: Collection[str] = (), told: Callable[[int], None] = lambda _: None
) -> int:
    """Write a run to `folder`, which must be new; returns how many trajectories.

    Only those of `states` where any are named, and only those whose data is still there. All plans and dead letters
    are written. `told` hears how many more trajectories were looked at. Raises StoreError: the folder is there.
    """
    with written_aside(folder) as partial:
        rows = _write_trajectories(stored, partial / TRAJECTORIES_FILE, states, told)
        with _writer(partial / PLANS_FILE, PLANS) as writer:
            for start in range(0, stored.steps(), PLANS_A_GROUP):
                steps = range(start, min(start + PLANS_A_GROUP, stored.steps()))
                plans = [plan for plan in map(stored.plan, steps) if plan is not None]
                writer.write_table(pa.Table.from_pylist([plan_row(plan) for plan in plans], PLANS))
        with _writer(partial / LETTERS_FILE, LETTERS) as writer:
            letters = [letter_row(name, letter) for name, letter in stored.letters()]
            writer.write_table(pa.Table.from_pylist(letters, LETTERS))
    return rows


def _write_trajectories(stored: StoredRun, path: Path, states: Collection[str], told: Callable[[int], None]) -> int:
    rows = 0
    about = {"format": FORMAT, "counters": _counters(stored)}
    with _writer(path, TRAJECTORIES.with_metadata({METADATA: json.dumps(about)})) as writer:
        for records in _row_groups(stored, states, told):
            writer.write_batch(trajectory_batch(records))
            rows += len(records)
    return rows


def _row_groups(
    stored: StoredRun, states: Collection[str], told: Callable[[int], None]
) -> Iterator[list[StoredTrajectory]]:
    """Records of a row group at a time, bounded by tokens and by rows."""
    records: list[StoredTrajectory] = []
    tokens = 0
    for name in stored.ids():
        told(1)
        record = stored.record(name)
        # A replay at work may have released it meanwhile.
        if record.trajectory is None or record.facts is None or (states and record.facts.state not in states):
            continue
        records.append(record)
        tokens += len(record.trajectory)
        if tokens >= GROUP_TOKENS or len(records) == GROUP_ROWS:
            yield records
            records, tokens = [], 0
    if records:
        yield records


def _counters(stored: StoredRun) -> dict[str, int]:
    counters = stored.counters()
    filters = [name for name in counters if name.startswith("filtered/")]
    released = min(stored.each(Transaction.counter, "released_steps"))
    return {**{name: counters[name] for name in (*COUNTERS, *filters)}, "released_steps": released}


def _writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, schema, compression="zstd")
