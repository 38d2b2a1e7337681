"""Makes a store from an exported run: to inspect it, to export it again, and to train from it (`replay.source`).

The files may come from a stranger. Every row is checked before it is stored: it must have the types that the store will
read, keep the invariants of these types, and fit the other rows. A wrong row ends the import, and the unfinished store
is deleted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lmdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.config.changes import ConfigChange
from asyncrl.errors import AsyncrlError, DataError
from asyncrl.ids import attempts_of, evaluated_version, held_out_row, is_evaluation, shard_of
from asyncrl.replay.counters import COUNTERS
from asyncrl.replay.store.changes import set_changes
from asyncrl.replay.store.images import WITHOUT_IMAGES
from asyncrl.replay.store.records import DeadLetter, TrajectoryRecord
from asyncrl.replay.store.store import READER_MAP_BYTES, Store
from asyncrl.replay.store.transaction import Transaction
from asyncrl.replay.stored import StoredTrajectory
from asyncrl.runs.inspect.columns import (
    DEAD_LETTER,
    DEAD_LETTERS,
    FORMAT,
    PLAN,
    PLANS,
    TRAJECTORIES,
    read_row,
    rows_of,
    values_of,
)
from asyncrl.runs.inspect.parquet import (
    DEAD_LETTERS_FILE,
    METADATA,
    PLANS_FILE,
    TRAJECTORIES_FILE,
    Progress,
    new_folder,
)
from asyncrl.types import DEMONSTRATED, BatchPlan, Trajectory
from asyncrl.wire import decode, encode, join, labels_message, read_labels, read_trajectory, trajectory_message

ROWS = 128
"""The number of rows that are read at once."""
MAX_COLUMN_BYTES = 4 << 30
"""The maximum number of bytes that the values of one column may take in a group of rows. A small compressed file can
need far more."""
OFFSET_BITS = 32
"""The bits of memory that each text takes, in addition to its bytes."""
LONGEST_REASON = 300
_WRONG = (
    *(AsyncrlError, OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError),
    *(msgspec.MsgspecError, pa.ArrowException, lmdb.BadValsizeError),
)
"""The errors that reading a file may raise if no export wrote the file."""

T = TypeVar("T")


def count_rows(source: Path) -> int:
    """Count the trajectories of an exported run. Raises DataError: `source` is not an exported run."""
    with _refused(source), _open(source / TRAJECTORIES_FILE, TRAJECTORIES) as file:
        return int(file.metadata.num_rows)


def import_run(source: Path, folder: Path, progress: Progress = lambda _: None) -> int:
    """Make a store in `folder`, which must be new or empty, from a run that was exported to `source`. Return the
    number of trajectories.

    Raises DataError: `source` is not an exported run; StoreError: `folder` exists and is not an empty folder.
    """
    with (
        new_folder(folder) as partial,
        closing(Store(partial, READER_MAP_BYTES, durable=True)) as store,
        _refused(source),
    ):
        rows = _take_trajectories(store, source / TRAJECTORIES_FILE, progress)
        _take_rows(store, source / PLANS_FILE, PLANS, _take_plan)
        _take_rows(store, source / DEAD_LETTERS_FILE, DEAD_LETTERS, _take_dead_letter)
        return rows


@contextmanager
def _refused(source: Path) -> Iterator[None]:
    try:
        yield
    except _WRONG as error:
        raise DataError(f"{source} is not a run that `asyncrl inspect export` wrote: {_in_short(error)}") from error


@contextmanager
def _row(path: Path, number: int, row: Mapping[str, Any]) -> Iterator[None]:
    """Add the number of the row, and its id or its step, to the message of an error in the `with` block."""
    try:
        yield
    except _WRONG as error:
        name = next((f" ({row[key]!r:.100})" for key in ("id", "step") if row.get(key) is not None), "")
        raise DataError(f"row {number} of {path.name}{name}: {_in_short(error)}") from error


def _in_short(error: Exception) -> str:
    """The reason on one line, with codes for control characters."""
    said = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in said)


def _take_trajectories(store: Store, path: Path, progress: Progress) -> int:
    rows = showing = 0
    with _open(path, TRAJECTORIES) as file:
        with store.transaction() as tx:
            _take_metadata(tx, file.schema_arrow.metadata or {})
        for batch in _batches(file):
            with store.transaction() as tx:
                for number, row in enumerate(rows_of(batch), start=rows):
                    with _row(path, number, row):
                        showing += _take_trajectory(tx, read_row(row))
                tx.set(WITHOUT_IMAGES, showing)
            rows += len(batch)
            progress(len(batch))
    return rows


def _take_metadata(tx: Transaction, metadata: Mapping[bytes, bytes]) -> None:
    about = _about(metadata)
    for name, value in msgspec.convert(about["counters"], dict[str, int]).items():
        # Other names of the same table are not counters.
        if name not in (*COUNTERS, "released_steps") and not name.startswith("filtered/"):
            raise ValueError(f"{name!r:.50} is not a counter")
        if not 0 <= value < 1 << 62:
            raise ValueError(f"the counter {name} is {value}")
        tx.set(name, value)
    tx.set("imported", 1)
    set_changes(tx, msgspec.convert(about.get("changes", []), list[ConfigChange]))


def _about(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """The metadata of an export: its format, counters and changes. Raises ValueError: they are missing, or have another
    format."""
    about = json.loads(metadata.get(METADATA, b"null"))
    if not isinstance(about, dict):
        raise ValueError(f"the metadata of {TRAJECTORIES_FILE} are missing")
    if about.get("format") != FORMAT:
        raise ValueError(f"its format is {about.get('format')!r:.50}, this asyncrl reads {FORMAT}")
    return about


def _take_trajectory(tx: Transaction, stored: StoredTrajectory) -> bool:
    """Store one trajectory. Return True if it has images. Raises an error of `_WRONG`."""
    assert stored.facts is not None
    name, facts = msgspec.convert(stored.id, str), _as_stored(stored.facts, TrajectoryRecord)
    _check_id(name, facts.group, facts.member)
    _require(TrajectoryRecord.load(tx, name) is None, "it comes twice")
    _check_record(facts)
    facts.save(tx, name)
    if stored.trajectory is not None:
        _check_fits(facts, stored.trajectory)
        frames = join(encode(trajectory_message(stored.trajectory)))
        read_trajectory(decode(encode(trajectory_message(stored.trajectory))))
        tx.put_bytes("data", name, frames)
    if stored.labels is not None:
        read_labels(decode(encode(labels_message(stored.labels))))
        tx.put_bytes("labels", name, join(encode(labels_message(stored.labels))))
    return stored.trajectory is not None and len(stored.trajectory.image_digests) > 0


def _check_id(name: str, group: str, member: int) -> None:
    """Check that `name` is the id of an attempt at this member of the group. Raises RefusedError or ValueError: it is
    not."""
    shard_of(group, 1)
    if is_evaluation(group):
        evaluated_version(group), held_out_row(group)
    attempt = name.removeprefix(attempts_of(group, member))
    _require(attempt.isdecimal() and name != attempt, f"it is not an id of member {member} of {group!r:.100}")


def _check_record(facts: TrajectoryRecord) -> None:
    numbers = (facts.reward, facts.outcome, facts.seconds, facts.process or 0.0)
    _require(all(map(math.isfinite, numbers)), f"its reward, outcome, score or time is not finite: {numbers}")
    counts = (
        *(facts.member, facts.tokens, facts.sampled, facts.turns),
        *(facts.attempts, facts.scored, facts.plans, facts.trained),
    )
    _require(min(counts) >= 0, f"one of its counts is negative: {counts}")
    _require(facts.seconds >= 0, f"its time is negative: {facts.seconds}")
    _require(0 <= facts.masked <= facts.sampled, f"it has {facts.masked} masked tokens of {facts.sampled}")
    _require(min(facts.last_plan, facts.lag, facts.row) >= -1, "its step, lag or row is less than -1")
    _require(facts.oldest >= DEMONSTRATED, f"its oldest version is {facts.oldest}")


def _check_fits(facts: TrajectoryRecord, trajectory: Trajectory) -> None:
    said = (facts.tokens, facts.sampled, facts.oldest)
    found = (len(trajectory), trajectory.sampled_tokens, trajectory.oldest_version)
    _require(said == found, f"tokens, sampled and oldest are {said}, but its arrays say {found}")


def _take_plan(tx: Transaction, row: Mapping[str, Any]) -> None:
    plan = _as_stored(BatchPlan(**values_of(PLAN, row)), BatchPlan)
    _require(plan.step == tx.count("plans"), f"the next step is {tx.count('plans')}")
    _require(plan.version >= 0, f"its version is {plan.version}")
    _require(all(0 <= weight < math.inf for weight in plan.weights), "a weight is negative or not finite")
    for index, name in enumerate(plan.ids):
        facts = TrajectoryRecord.load(tx, name)
        if facts is None:
            raise ValueError(f"it names {name!r:.100}, which {TRAJECTORIES_FILE} lacks: export all states")
        said = (plan.group_ids[index], plan.tokens[index], plan.sampled[index])
        found = (facts.group, facts.tokens, facts.sampled)
        _require(said == found, f"group, tokens and sampled of {name} are {said}, but its row says {found}")
        _require(
            not plan.shared or 0 <= plan.shared[index] <= facts.tokens,
            f"{name} shares more tokens than it has, or fewer than 0",
        )
    counts = zip(plan.trained_tokens, plan.sampled, strict=True)
    _require(all(0 <= trained <= sampled for trained, sampled in counts), "it trains more tokens than were sampled")
    _require(all(0 <= index < len(plan.ids) for index in plan.demonstrations), "a demonstration is not among its ids")
    tx.put("plans", plan.step, plan)


def _take_dead_letter(tx: Transaction, row: Mapping[str, Any]) -> None:
    letter = _as_stored(DeadLetter(**values_of(DEAD_LETTER, row)), DeadLetter)
    name = msgspec.convert(row["id"], str)
    _check_id(name, letter.group, letter.member)
    _require(DeadLetter.load(tx, name) is None, "it comes twice")
    _require(min(letter.member, letter.attempt) >= 0 and letter.row >= -1, "its member, attempt or row is negative")
    letter.save(tx, name)


def _as_stored(value: T, kind: type[T]) -> T:
    """The value as the store will read it. Raises ValidationError: the types of its fields are not those of `kind`."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _take_rows(
    store: Store, path: Path, schema: pa.Schema, take: Callable[[Transaction, Mapping[str, Any]], None]
) -> None:
    with _open(path, schema) as file, store.transaction() as tx:
        rows = (row for batch in _batches(file) for row in batch.to_pylist())
        for number, row in enumerate(rows):
            with _row(path, number, row):
                take(tx, row)


def _open(path: Path, schema: pa.Schema) -> pq.ParquetFile:
    file = pq.ParquetFile(path)
    metadata = file.schema_arrow.metadata or {}
    if METADATA in metadata:
        # Another format has other columns, so the number of the format is checked before the columns.
        _about(metadata)
    theirs = {field.name: field.type for field in file.schema_arrow}
    if theirs != {field.name: field.type for field in schema} or len(file.schema_arrow) != len(schema):
        raise ValueError(f"the columns of {path.name} are {file.schema_arrow.names}, not {schema.names}")
    return file


def _batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    # Each row group is read by a call of its own, since a single call for all would keep more and more of them in
    # memory.
    for group in range(file.num_row_groups):
        _check_size(file, group)
        yield from file.iter_batches(ROWS, row_groups=[group])


def _check_size(file: pq.ParquetFile, group: int) -> None:
    """Check the size of a row group. Raises ValueError: a column would take too much memory."""
    columns = file.metadata.row_group(group)
    for index in range(columns.num_columns):
        column, kind = columns.column(index), file.schema_arrow.field(index).type
        kind = kind.value_type if pa.types.is_list(kind) else kind
        bits = OFFSET_BITS if pa.types.is_string(kind) else kind.bit_width
        size = max(column.total_uncompressed_size, column.num_values * bits // 8)
        if size > MAX_COLUMN_BYTES:
            raise ValueError(
                f"rows of {column.path_in_schema} take {size} bytes at once; at most {MAX_COLUMN_BYTES} are read"
            )
