"""An exported run back to a store: to look into, to export again, and to train from (`replay.source`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.errors import DataError
from asyncrl.inspect.aside import written_aside
from asyncrl.inspect.columns import (
    FORMAT,
    LETTERS,
    LETTERS_FILE,
    PLANS,
    PLANS_FILE,
    TRAJECTORIES,
    TRAJECTORIES_FILE,
    read_trajectories,
)
from asyncrl.inspect.exporting import METADATA
from asyncrl.replay.records import DeadLetter
from asyncrl.replay.store import READER_MAP_BYTES, Store, Transaction
from asyncrl.replay.stored import StoredTrajectory
from asyncrl.types import BatchPlan
from asyncrl.wire import encode, join, labels_message, plan_body, trajectory_message

ROWS = 128


def count_rows(source: Path) -> int:
    """How many trajectories an exported run has. Raises DataError: `source` is none."""
    with _refused(source), _open(source / TRAJECTORIES_FILE, TRAJECTORIES) as file:
        return int(file.metadata.num_rows)


def import_run(source: Path, folder: Path, told: Callable[[int], None] = lambda _: None) -> int:
    """Make a store in `folder`, which must be new, of what was exported to `source`; returns how many trajectories.

    `told` hears of each part of them. Raises DataError: `source` is no exported run; StoreError: `folder` is there.
    """
    with (
        written_aside(folder) as partial,
        closing(Store(partial, READER_MAP_BYTES, durable=True)) as store,
        _refused(source),
    ):
        return _fill(store, source, told)


@contextmanager
def _refused(source: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{source} is no run that `asyncrl replay export` wrote: {error}") from error


def _fill(store: Store, source: Path, told: Callable[[int], None]) -> int:
    rows = 0
    with _open(source / TRAJECTORIES_FILE, TRAJECTORIES) as file:
        _put_counters(store, file.schema_arrow.metadata[METADATA])
        for batch in _batches(file):
            with store.transaction() as tx:
                for record in read_trajectories(batch):
                    _put(tx, record)
            rows += len(batch)
            told(len(batch))
    with store.transaction() as tx:
        for row in _rows(source / PLANS_FILE, PLANS):
            tx.put("plans", row["step"], plan_body(BatchPlan(**row)))
    with store.transaction() as tx:
        for row in _rows(source / LETTERS_FILE, LETTERS):
            name = row.pop("id")
            DeadLetter(**row).save(tx, name)
    return rows


def _put_counters(store: Store, metadata: bytes) -> None:
    about = json.loads(metadata)
    if about["format"] != FORMAT:
        raise ValueError(f"its format is {about['format']}, this asyncrl reads {FORMAT}")
    with store.transaction() as tx:
        for name, value in {**about["counters"], "imported": 1}.items():
            tx.set(name, int(value))


def _put(tx: Transaction, record: StoredTrajectory) -> None:
    assert record.trajectory is not None
    assert record.facts is not None
    name = record.trajectory.id
    record.facts.save(tx, name)
    tx.put_bytes("data", name, join(encode(trajectory_message(record.trajectory))))
    if record.labels is not None:
        tx.put_bytes("labels", name, join(encode(labels_message(record.labels))))


def _open(path: Path, schema: pa.Schema) -> pq.ParquetFile:
    file = pq.ParquetFile(path)
    if not file.schema_arrow.equals(schema):
        raise ValueError(f"the columns of {path.name} are {file.schema_arrow.names}, not {schema.names}")
    return file


def _rows(path: Path, schema: pa.Schema) -> Iterator[dict[str, Any]]:
    with _open(path, schema) as file:
        for batch in _batches(file):
            yield from batch.to_pylist()


def _batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    # One walk over all row groups would keep more and more of them in memory.
    for group in range(file.num_row_groups):
        yield from file.iter_batches(ROWS, row_groups=[group])
