"""A run's store to Parquet, and an exported run back to a store: to inspect it, to export it again, and to train from
it (`replay.source`).

Memory does not grow with the run, and an export does not disturb a running replay.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.config.changes import ConfigChange
from asyncrl.errors import DataError, StoreError
from asyncrl.inspect.columns import (
    DEAD_LETTER,
    DEAD_LETTERS,
    FORMAT,
    PLAN,
    PLANS,
    STEP,
    STEPS,
    TRAJECTORIES,
    read_trajectories,
    row_of,
    trajectory_batch,
    values_of,
)
from asyncrl.inspect.episodes import step_row
from asyncrl.inspect.run import Decode
from asyncrl.machine.files import partial_name
from asyncrl.replay.changes import set_changes
from asyncrl.replay.counters import COUNTERS
from asyncrl.replay.images import WITHOUT_IMAGES
from asyncrl.replay.records import DeadLetter
from asyncrl.replay.store import READER_MAP_BYTES, Store
from asyncrl.replay.stored import StoredRun, StoredTrajectory
from asyncrl.replay.transaction import Transaction
from asyncrl.types import BatchPlan
from asyncrl.wire import encode, join, labels_message, trajectory_message

Progress = Callable[[int], None]
"""Takes the number of trajectories that were handled since the last call."""

TRAJECTORIES_FILE, STEPS_FILE = "trajectories.parquet", "steps.parquet"
PLANS_FILE, DEAD_LETTERS_FILE = "plans.parquet", "dead_letters.parquet"
METADATA = b"asyncrl"
GROUP_TOKENS, GROUP_ROWS = 1 << 20, 4096
"""A row group ends with so many tokens or rows."""
PLANS_A_GROUP = 64
ROWS = 128
"""Rows that an import reads at once."""


def export_run(
    stored: StoredRun,
    folder: Path,
    states: Collection[str] = (),
    progress: Progress = lambda _: None,
    group_tokens: int = GROUP_TOKENS,
    decode: Decode | None = None,
) -> int:
    """Write a run to `folder`, which must be new; returns how many trajectories.

    With `states` it writes only trajectories in one of them. Of those whose data is gone it writes the record. With
    `decode` it writes the texts of prompts and answers. All steps, plans and dead letters are written. Raises
    StoreError: the folder exists.
    """
    with _new_folder(folder) as partial:
        rows = 0
        changes = [asdict(each) for each in stored.changes()]
        about = {"format": FORMAT, "counters": _counters(stored), "changes": changes}
        schema = TRAJECTORIES.with_metadata({METADATA: json.dumps(about)})
        with pq.ParquetWriter(partial / TRAJECTORIES_FILE, schema, compression="zstd") as writer:
            for group in _row_groups(stored, states, progress, group_tokens):
                writer.write_batch(trajectory_batch(group, decode))
                rows += len(group)
        with (
            pq.ParquetWriter(partial / PLANS_FILE, PLANS, compression="zstd") as plan_writer,
            pq.ParquetWriter(partial / STEPS_FILE, STEPS, compression="zstd") as step_writer,
        ):
            for start in range(0, stored.steps(), PLANS_A_GROUP):
                steps = range(start, min(start + PLANS_A_GROUP, stored.steps()))
                plans = [plan for plan in map(stored.plan, steps) if plan is not None]
                plan_writer.write_table(pa.Table.from_pylist([row_of(PLAN, plan) for plan in plans], PLANS))
                summaries = [row_of(STEP, step_row(stored, plan)) for plan in plans]
                step_writer.write_table(pa.Table.from_pylist(summaries, STEPS))
        with pq.ParquetWriter(partial / DEAD_LETTERS_FILE, DEAD_LETTERS, compression="zstd") as writer:
            letters = [{"id": name, **row_of(DEAD_LETTER, letter)} for name, letter in stored.dead_letters()]
            writer.write_table(pa.Table.from_pylist(letters, DEAD_LETTERS))
    return rows


def _row_groups(
    stored: StoredRun, states: Collection[str], progress: Progress, group_tokens: int
) -> Iterator[list[StoredTrajectory]]:
    group: list[StoredTrajectory] = []
    tokens = 0
    for name, facts in stored.records():
        progress(1)
        if states and facts.state not in states:
            continue
        record = stored.record(name)
        group.append(record)
        tokens += 0 if record.trajectory is None else len(record.trajectory)
        if tokens >= group_tokens or len(group) == GROUP_ROWS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _counters(stored: StoredRun) -> dict[str, int]:
    counters = stored.counters()
    filters = [name for name in counters if name.startswith("filtered/")]
    released = min(stored.each(Transaction.counter, "released_steps"))
    return {**{name: counters[name] for name in (*COUNTERS, *filters)}, "released_steps": released}


def count_rows(source: Path) -> int:
    """How many trajectories an exported run has. Raises DataError: `source` is none."""
    with _refused(source), _open(source / TRAJECTORIES_FILE, TRAJECTORIES) as file:
        return int(file.metadata.num_rows)


def import_run(source: Path, folder: Path, progress: Progress = lambda _: None) -> int:
    """Make a store in `folder`, which must be new, from a run that was exported to `source`; returns how many
    trajectories.

    Raises DataError: `source` is no exported run; StoreError: `folder` exists.
    """
    with (
        _new_folder(folder) as partial,
        closing(Store(partial, READER_MAP_BYTES, durable=True)) as store,
        _refused(source),
    ):
        return _fill(store, source, progress)


@contextmanager
def _refused(source: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{source} is no run that `asyncrl inspect export` wrote: {error}") from error


def _fill(store: Store, source: Path, progress: Progress) -> int:
    rows = showing = 0
    with _open(source / TRAJECTORIES_FILE, TRAJECTORIES) as file:
        about = json.loads(file.schema_arrow.metadata[METADATA])
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']}, this asyncrl reads {FORMAT}")
        with store.transaction() as tx:
            for name, value in {**about["counters"], "imported": 1}.items():
                tx.set(name, int(value))
            set_changes(tx, [ConfigChange(**each) for each in about.get("changes", ())])
        for batch in _batches(file):
            with store.transaction() as tx:
                for stored in read_trajectories(batch):
                    _put(tx, stored)
                    showing += stored.trajectory is not None and len(stored.trajectory.image_digests) > 0
                tx.set(WITHOUT_IMAGES, showing)
            rows += len(batch)
            progress(len(batch))
    with store.transaction() as tx:
        for row in _rows(source / PLANS_FILE, PLANS):
            tx.put("plans", row["step"], BatchPlan(**values_of(PLAN, row)))
        for row in _rows(source / DEAD_LETTERS_FILE, DEAD_LETTERS):
            DeadLetter(**values_of(DEAD_LETTER, row)).save(tx, row["id"])
    return rows


def _put(tx: Transaction, stored: StoredTrajectory) -> None:
    assert stored.facts is not None
    name = stored.id
    stored.facts.save(tx, name)
    if stored.trajectory is not None:
        tx.put_bytes("data", name, join(encode(trajectory_message(stored.trajectory))))
    if stored.labels is not None:
        tx.put_bytes("labels", name, join(encode(labels_message(stored.labels))))


def _open(path: Path, schema: pa.Schema) -> pq.ParquetFile:
    file = pq.ParquetFile(path)
    theirs, ours = ({field.name: field.type for field in each} for each in (file.schema_arrow, schema))
    if theirs != ours:
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


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` when the block ends, and is removed when the block raises.

    Raises StoreError: `folder` exists.
    """
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(f"{folder} exists, and nothing is overwritten: name a new folder")
    partial = partial_name(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
