"""Writes a run's store to Parquet files. `importing` makes a store from the files.

Memory does not grow with the run, and an export does not disturb a running replay.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.errors import StoreError
from asyncrl.machine.files import partial_name
from asyncrl.replay.counters import COUNTERS
from asyncrl.replay.store.transaction import Transaction
from asyncrl.replay.stored import StoredRun, StoredTrajectory
from asyncrl.runs.decoding import Decode
from asyncrl.runs.inspect.columns import (
    DEAD_LETTER,
    DEAD_LETTERS,
    FORMAT,
    PLAN,
    PLANS,
    STEP,
    STEPS,
    TRAJECTORIES,
    row_of,
    trajectory_batch,
)
from asyncrl.runs.inspect.episodes import step_row

Progress = Callable[[int], None]
"""Takes the number of trajectories that were handled since the last call."""

TRAJECTORIES_FILE, STEPS_FILE = "trajectories.parquet", "steps.parquet"
PLANS_FILE, DEAD_LETTERS_FILE = "plans.parquet", "dead_letters.parquet"
METADATA = b"asyncrl"
GROUP_TOKENS, GROUP_ROWS = 1 << 20, 4096
"""A row group ends once it has this number of tokens, or this number of rows."""
PLANS_A_GROUP = 64


def export_run(
    stored: StoredRun,
    folder: Path,
    states: Collection[str] = (),
    progress: Progress = lambda _: None,
    group_tokens: int = GROUP_TOKENS,
    decode: Decode | None = None,
) -> int:
    """Write a run to `folder`, which must be new or empty. Return the number of trajectories.

    With `states` it writes only trajectories in one of these states, but all steps, plans and dead letters. If the
    tokens of a trajectory were removed, its row has only the values of its record. With `decode` it writes the texts
    of prompts and answers. Raises StoreError: the folder exists and is not empty.
    """
    with new_folder(folder) as partial:
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


def trajectory_table(stored: StoredRun, states: Collection[str] = (), decode: Decode | None = None) -> pa.Table:
    """A table in memory with the trajectories of a run, and with the columns of an exported run. See `export_run` for
    the arguments."""
    groups = _row_groups(stored, states, lambda _: None, GROUP_TOKENS)
    return pa.Table.from_batches((trajectory_batch(each, decode) for each in groups), TRAJECTORIES)


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


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` when the `with` block ends. If the block raises, the folder is removed.

    Raises StoreError: `folder` exists and is not an empty folder.
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
