"""The store: LMDB tables that change together in one transaction, so that a crash leaves either the whole change or
none of it.

So a trajectory, its labels, its lease and its plan always agree, which makes exactly-once processing possible. The
store has the whole durable state of the replay. `transaction.py` has the reads and writes of a transaction.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from asyncrl.errors import StoreError
from asyncrl.replay.store import images
from asyncrl.replay.store.environment import (
    ADVICE,
    OTHER_VERSION,
    READERS_FILE,
    clear_errors,
    clear_room_errors,
    open_environment,
)
from asyncrl.replay.store.transaction import Transaction

TABLES = (
    "meta",  # counters and the store's identity
    "actors",  # worker -> incarnation
    "scorers",  # worker -> incarnation
    "pending",  # order -> ticket that waits for an actor
    "tickets",  # ticket -> TicketRecord
    "held",  # worker -> tickets that it holds (many)
    "groups",  # group -> GroupRecord
    "trajectories",  # trajectory -> TrajectoryRecord; never deleted, so that an id is never taken twice
    "data",  # trajectory -> frames
    "labels",  # trajectory -> frames
    "waiting",  # kind of scores, order -> trajectory or group that needs them next
    "leased",  # scorer -> trajectories it scores (many)
    "ready",  # order -> ReadyGroup: complete, labelled, may be trained
    "again",  # order -> row of a task that is to be run again before the feed continues
    "tasks",  # row -> [running success rate, epoch]
    "plans",  # step -> BatchPlan
    "dead",  # ticket -> DeadLetter
    "dead_by_age",  # order -> ticket of a dead letter
    "evaluations",  # policy version -> EvaluationRecord
    *images.TABLES,
)
MULTIPLE = ("held", "leased", *images.MULTIPLE)
FORMAT = 3
"""The version of the store's format (tables and fields of records). A store with a different format is refused."""
FIRST_BYTES = 2 * mmap.PAGESIZE
"""The bytes that LMDB writes into a new file before the first commit."""
READER_MAP_BYTES = 1 << 42
"""The address space that a reader maps, large enough for all that a writer may add. It takes no memory."""

LOCK_FILE = "in-use"
"""The process that has the store open for writing holds a lock on this file."""
MADE = "made\n"
ENDPOINT_FILE = "endpoint"
"""The file with the address of the replay that serves the store, or served it last."""
RETRY_S = 0.01


class Store:
    """A store in a folder. With `durable`, every commit survives a power loss. Without it, a commit survives the death
    of the process, but not a power loss. Each store has a unique identity, by which replays of different runs are
    distinguished.

    Raises StoreError: the folder cannot be opened as a store, or another process still has it open after `patience_s`
    seconds; OSError: the disk is full; ConfigError: the store is full. Transactions also raise StoreError if they find
    damage.
    """

    def __init__(self, path: Path, max_bytes: int, durable: bool, patience_s: float = 1.0) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = (path / LOCK_FILE).open("a+")
        # Tries again for a while, since another process that calls `in_use` holds the lock for a moment.
        give_up = time.monotonic() + patience_s
        while not _locked(self._lock, fcntl.LOCK_EX):
            if time.monotonic() > give_up:
                self._lock.close()
                raise StoreError(f"the store {path} is open in another process; stop that process first")
            time.sleep(RETRY_S)
        with contextlib.ExitStack() as locked:
            locked.callback(self._lock.close)
            self._open(path, max_bytes, durable)
            locked.pop_all()

    def _open(self, path: Path, max_bytes: int, durable: bool) -> None:
        file = path / "data.mdb"
        size = file.stat().st_size if file.exists() else 0
        if self._was_made() and not size:
            # Without this check, LMDB would create an empty store, and the run would start from the beginning.
            raise StoreError(f"{file} is missing or empty, but there was a store; {ADVICE}")
        if not self._was_made() and size < FIRST_BYTES:
            # The disk was full before LMDB had written its first two pages. LMDB would always refuse this file.
            file.unlink(missing_ok=True)
        self._environment, self._tables = open_environment(
            path, TABLES, MULTIPLE, map_size=max_bytes, sync=durable, metasync=durable
        )
        with _closed_on_error(self):
            with clear_room_errors(path), self.transaction() as tx:
                if not tx.count("meta"):  # It is new.
                    tx.put("meta", "identity", uuid.uuid4().hex)
                    tx.set("format", FORMAT)
                _check_format(path, tx)
            if not self._was_made():
                self._lock.write(MADE)
                self._lock.flush()
                os.fsync(self._lock.fileno())

    @contextlib.contextmanager
    def transaction(self, write: bool = True) -> Iterator[Transaction]:
        """A transaction, committed at the end of the block, and undone if the block raises. In a read transaction,
        returned bytes are views of the file, and only valid within the block."""
        begin = self._environment.begin
        with clear_errors(self.path), begin(write=True) if write else begin(buffers=True) as raw:
            tx = Transaction(self._environment, self._tables, raw)
            yield tx
            tx.flush()
        for effect in tx.effects:
            effect()

    def _was_made(self) -> bool:
        self._lock.seek(0)
        return self._lock.read() == MADE

    def close(self) -> None:
        self._environment.close()
        self._lock.close()


@contextlib.contextmanager
def _closed_on_error(store: Store | StoreReader) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        yield
        stack.pop_all()


def _check_format(path: Path, tx: Transaction) -> None:
    if (found := tx.counter("format")) != FORMAT:
        raise StoreError(f"the store {path} has format {found}, and this version reads {FORMAT}: {OTHER_VERSION}")


def in_use(path: Path) -> bool:
    """True if a process has the store in this folder open for writing. The test writes no file, so that read access to
    the folder is enough."""
    try:
        with (path / LOCK_FILE).open() as lock:
            return not _locked(lock, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _locked(file: IO[str], kind: int) -> bool:
    """Try to lock a file without waiting. True if this process now has the lock. Closing the file releases the lock."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class StoreReader:
    """A store opened for reading only. Another process may have it open for writing. Without write access to LMDB's
    table of readers, this process cannot add itself to the table. Instead it keeps writers out as long as it has the
    store open.

    Raises StoreError: there is no store in the folder, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        if not (path / "data.mdb").is_file():
            raise StoreError(f"there is no store in {path}; name the replay folder of a run, such as runs/NAME/replay")
        self.path = path
        with contextlib.ExitStack() as stack:
            listed = os.access(path / READERS_FILE, os.W_OK)
            if not listed:
                stack.enter_context(_without_writers(path))
            self._environment, self._tables = open_environment(
                path, TABLES, MULTIPLE, map_size=READER_MAP_BYTES, readonly=True, lock=listed
            )
            self._alone = stack.pop_all()
        with _closed_on_error(self), self.transaction() as tx:
            _check_format(path, tx)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A read transaction on a snapshot of the store."""
        with clear_errors(self.path), self._environment.begin() as raw:
            yield Transaction(self._environment, self._tables, raw)

    def close(self) -> None:
        self._environment.close()
        self._alone.close()


@contextlib.contextmanager
def _without_writers(path: Path) -> Iterator[None]:
    """Keep other processes from opening the store for writing within the block. Raises StoreError: a process has it
    open."""
    try:
        lock = (path / LOCK_FILE).open()
    except FileNotFoundError:
        # No process has ever opened this copy of a store for writing: that would have created the lock file.
        yield
        return
    except OSError as error:
        raise StoreError(f"cannot open the store {path}: {error}") from error
    with lock:
        if not _locked(lock, fcntl.LOCK_SH):
            raise StoreError(
                f"the store {path} is in use; reading it meanwhile needs write access to {path / READERS_FILE}"
            )
        yield
